"""Train a small Gluon model on drawn digits, as a script for Horovod does it.

    allstep run --as-horovod -np 2 examples/horovod_mxnet.py

The lines with `hvd` are those of Horovod's own examples; MXNet 1.9.1 is retired, but runs.
"""

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

# Segments of a digit display (top, upper left and right, middle, lower left and right, bottom).
SEGMENTS = ["1110111", "0010010", "1011101", "1011011", "0111010"]
SEGMENTS += ["1101011", "1101111", "1010010", "1111111", "1111011"]
BOXES = [(2, 3, 4, 10), (2, 8, 3, 4), (2, 8, 9, 10), (7, 8, 4, 10), (8, 14, 3, 4), (8, 14, 9, 10)]
BOXES += [(13, 14, 4, 10)]


def draw_digits(count, seed):
    """Return images of 16 x 16 pixels with noise, moved by up to 2 pixels, and their labels."""
    random = np.random.RandomState(seed)
    labels = random.randint(0, 10, count)
    images = random.uniform(0, 0.5, (count, 1, 16, 16)).astype("float32")
    for image, label in zip(images, labels, strict=True):
        for (top, bottom, left, right), is_on in zip(BOXES, SEGMENTS[label], strict=True):
            image[0, top : bottom + 1, left : right + 1] += is_on == "1"
        image[0] = np.roll(image[0], random.randint(-2, 3, 2), (0, 1))
    return images, labels.astype("float32")


def make_model():
    model = gluon.nn.HybridSequential()
    model.add(
        gluon.nn.Conv2D(16, kernel_size=5, activation="tanh"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Dense(64, activation="tanh"),
        gluon.nn.Dense(10),
    )
    model.initialize(mx.init.Xavier())
    model.hybridize()
    return model


def main():
    hvd.init()
    images, labels = draw_digits(2048, seed=0)
    # Each worker trains on its share.
    dataset = gluon.data.ArrayDataset(
        images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]
    )
    loader = gluon.data.DataLoader(dataset, batch_size=32, shuffle=True, last_batch="discard")

    model = make_model()
    # The shapes are not known yet: the weights are broadcast when they are initialized.
    params = model.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    optimizer_params = {"learning_rate": 0.02 * hvd.size(), "momentum": 0.9}
    trainer = hvd.DistributedTrainer(params, "sgd", optimizer_params)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    for epoch in range(3):
        total = mx.nd.zeros(1)
        for batch, target in loader:
            with autograd.record():
                loss = loss_of(model(batch), target)
            loss.backward()
            trainer.step(len(batch))
            total += loss.mean()
        mean = hvd.allreduce(total / len(loader), name="loss").asscalar()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f}")

    # Each worker counts the right answers for its share of the test images.
    images, labels = draw_digits(500, seed=1)
    answers = model(mx.nd.array(images[hvd.rank() :: hvd.size()])).argmax(axis=1)
    right = (answers == mx.nd.array(labels[hvd.rank() :: hvd.size()])).sum()
    accuracy = hvd.allreduce(right, op=hvd.Sum, name="right").asscalar() / len(labels)
    if hvd.rank() == 0:
        print(f"{hvd.size()} workers: accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
