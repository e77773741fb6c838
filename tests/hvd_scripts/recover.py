"""Train a linear model with each of the given front-ends in turn; workers may be lost in each.

    recover.py FOLDER BLOCKED NAME ...      BLOCKED: a module that is not imported, or "-"

The workers divide every global batch among them, so the result does not depend on their number.
Rank r begins with weights of its own: those of rank 0 count. Each training ends with all workers,
and leaves a file in FOLDER, by which a worker that joins later omits it.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

STEPS, ALL = 8, 3
generator = np.random.default_rng(0)
X = generator.normal(size=(STEPS, 12, 3)).astype("float32")
Y = generator.normal(size=(STEPS, 12, 2)).astype("float32")


def start_weights(rank):
    return np.full((3, 2), 0.1 + rank, "float32"), np.full(2, 0.2 + rank, "float32")


class Training:
    """One training: the state, and what a step does with this worker's share of a batch."""

    def __init__(self, hvd, state, step, weights):
        self.hvd, self.state, self.step, self.weights = hvd, state, step, weights

    def share(self, step):
        mine = slice(self.hvd.rank(), None, self.hvd.size())
        return X[step][mine], Y[step][mine]

    def wait(self):
        """Wait for the successor of a lost worker before the last step."""
        while self.state.step == STEPS - 1 and self.hvd.size() < ALL:
            time.sleep(0.05)
            self.state.commit()

    def done(self):
        self.state.step += 1
        self.state.sizes = [*self.state.sizes, self.hvd.size()]

    def run(self):
        @self.hvd.elastic.run
        def train(state):
            while state.step < STEPS:
                self.wait()
                self.step(self)

        train(self.state)
        return [self.state.sizes, *(np.array(each).tolist() for each in self.weights())]


def torch_loop():
    import torch

    import allstep.torch as hvd

    model = torch.nn.Linear(3, 2)
    kernel, bias = map(torch.tensor, start_weights(hvd.rank()))
    model.load_state_dict({"weight": kernel.T, "bias": bias})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step(training):
        x, y = map(torch.tensor, training.share(training.state.step))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        training.done()
        training.state.commit()

    def weights():
        return [model.weight.detach().T.numpy(), model.bias.detach().numpy()]

    state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[])
    return Training(hvd, state, step, weights)


def tensorflow_loop():
    import allstep.tensorflow as hvd
    import tensorflow as tf

    kernel, bias = (tf.Variable(each) for each in start_weights(hvd.rank()))
    velocities = [tf.Variable(tf.zeros_like(each)) for each in (kernel, bias)]

    @tf.function(reduce_retracing=True)
    def update(x, y):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean((x @ kernel + bias - y) ** 2)
        gradients = tape.gradient(loss, [kernel, bias])
        for variable, velocity, gradient in zip((kernel, bias), velocities, gradients, strict=True):
            velocity.assign(0.9 * velocity - 0.1 * gradient)
            variable.assign_add(velocity)

    state = hvd.elastic.TensorFlowState([kernel, bias, *velocities], step=0, sizes=[])
    return Training(hvd, state, in_graph(update), lambda: [kernel, bias])


def keras_in_graph():
    """A loop of the user's own, in which the optimizer reduces inside a graph."""
    import allstep.tensorflow as hvd
    import tensorflow as tf
    from allstep.keras import DistributedOptimizer

    model, optimizer = keras_model(hvd.rank(), tf.keras)
    optimizer = DistributedOptimizer(optimizer)
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def update(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, step=0, sizes=[])
    return Training(hvd, state, in_graph(update), model.get_weights)


def in_graph(update):
    def step(training):
        import tensorflow as tf

        update(*map(tf.constant, training.share(training.state.step)))
        training.done()
        training.state.commit()

    return step


def keras_model(rank, keras):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.set_weights(start_weights(rank))
    return model, keras.optimizers.SGD(0.1, momentum=0.9)


def keras_fit(hvd, keras):
    model, optimizer = keras_model(hvd.rank(), keras)
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    state = hvd.elastic.KerasState(model, step=0, sizes=[])

    class Progress(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            training.done()

    def step(training):
        first = training.state.step
        last = STEPS if first == STEPS - 1 else STEPS - 1
        batches = [training.share(number) for number in range(first, last)]
        model.fit(
            np.concatenate([x for x, _ in batches]),
            np.concatenate([y for _, y in batches]),
            batch_size=len(batches[0][0]),
            shuffle=False,
            verbose=0,
            callbacks=[Progress(), hvd.elastic.CommitStateCallback(training.state)],
        )

    training = Training(hvd, state, step, model.get_weights)
    return training


def keras3():
    import allstep.keras as hvd
    import keras

    return keras_fit(hvd, keras)


def keras2():
    import tf_keras

    import allstep.keras2 as hvd

    return keras_fit(hvd, tf_keras)


TRAININGS = {
    "torch": torch_loop,
    "tensorflow": tensorflow_loop,
    "graph": keras_in_graph,
    "keras": keras3,
    "keras2": keras2,
}


def main(folder, blocked, names):
    from allstep.hvd.basics import init, rank, shutdown
    from allstep.hvd.objects import allgather_object

    if blocked != "-":
        # Keras imports it if it is there, and that takes seconds.
        sys.modules[blocked] = None
    init()
    for name in names:
        mark = Path(folder, name)
        if not mark.exists():
            result = TRAININGS[name]().run()
            mark.touch()
            print("result", json.dumps([name, rank(), *result]), flush=True)
    allgather_object(rank(), "the end")
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
