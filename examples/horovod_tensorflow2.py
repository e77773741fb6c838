"""Train a small model with a loop of TensorFlow on several workers, in Horovod's style.

allstep run --as-horovod -np 2 python examples/horovod_tensorflow2.py
"""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf


def images(count, seed):
    """Return images of ten classes, each class a pattern of its own with noise, and the classes."""
    patterns = np.random.default_rng(0).random((10, 28, 28, 1), dtype=np.float32)
    random = np.random.default_rng(seed)
    classes = random.integers(10, size=count)
    noise = random.normal(size=(count, 28, 28, 1)).astype(np.float32)
    return patterns[classes] + noise, classes


def build_model():
    return tf.keras.Sequential(
        [
            tf.keras.Input((28, 28, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )


def main():
    hvd.init()
    x, y = images(2048, seed=1)
    share = slice(hvd.rank(), None, hvd.size())  # this worker's part of the data
    data = tf.data.Dataset.from_tensor_slices((x[share], y[share])).shuffle(2048, seed=0).batch(32)

    model = build_model()
    optimizer = tf.keras.optimizers.Adam(0.001 * hvd.size())
    optimizer.build(model.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(batch, classes):
        with tf.GradientTape() as tape:
            loss = loss_of(classes, model(batch, training=True))
        tape = hvd.DistributedGradientTape(tape)  # average the gradients over the workers
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    # All workers start with equal weights.
    hvd.broadcast_variables([v.value for v in model.variables + optimizer.variables], root_rank=0)
    for _ in range(3):
        for batch, classes in data:
            step(batch, classes)

    if hvd.rank() == 0:
        x, y = images(1024, seed=2)
        logits = model(x)
        accuracy = np.mean(np.argmax(logits, axis=1) == y)
        print(
            f"tensorflow on {hvd.size()} workers: loss {loss_of(y, logits):.4f},"
            f" accuracy {accuracy:.1%}"
        )


if __name__ == "__main__":
    main()
