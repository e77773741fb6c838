"""Train a small convolutional model with Gluon on several workers, in Horovod's style.

allstep run --as-horovod -np 2 python examples/horovod_mxnet.py
"""

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon


def images(count, seed):
    """Return images of ten classes, each class a pattern of its own with noise, and the classes."""
    patterns = np.random.default_rng(0).random((10, 1, 28, 28), dtype=np.float32)
    random = np.random.default_rng(seed)
    classes = random.integers(10, size=count)
    noise = random.normal(size=(count, 1, 28, 28)).astype(np.float32)
    return patterns[classes] + noise, classes.astype(np.float32)


def build_model():
    model = gluon.nn.HybridSequential()
    model.add(
        gluon.nn.Conv2D(16, 3, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Conv2D(32, 3, activation="relu"),
        gluon.nn.GlobalAvgPool2D(),
        gluon.nn.Dense(10),
    )
    model.initialize(mx.init.Xavier())
    model.hybridize()
    return model


def main():
    hvd.init()
    x, y = images(4096, seed=1)
    share = slice(hvd.rank(), None, hvd.size())  # this worker's part of the data
    dataset = gluon.data.ArrayDataset(x[share], y[share])
    data = gluon.data.DataLoader(dataset, batch_size=32, shuffle=True)

    model = build_model()
    parameters = model.collect_params()
    hvd.broadcast_parameters(parameters, root_rank=0)  # all workers start with equal weights
    options = {"learning_rate": 0.002 * hvd.size()}
    trainer = hvd.DistributedTrainer(parameters, "adam", options)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    for _ in range(3):
        for batch, classes in data:
            with autograd.record():
                loss = loss_of(model(batch), classes)
            loss.backward()
            trainer.step(len(batch))  # averages the gradients over the workers

    if hvd.rank() == 0:
        x, y = images(1024, seed=2)
        logits = model(mx.nd.array(x))
        accuracy = np.mean(logits.asnumpy().argmax(axis=1) == y)
        loss = loss_of(logits, mx.nd.array(y)).mean().asscalar()
        print(f"mxnet on {hvd.size()} workers: loss {loss:.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
