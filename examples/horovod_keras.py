"""Train a small convolutional model with Keras on several workers, in Horovod's style.

allstep run --as-horovod -np 2 python examples/horovod_keras.py
"""

import horovod.tensorflow.keras as hvd
import keras
import numpy as np


def images(count, seed):
    """Return images of ten classes, each class a pattern of its own with noise, and the classes."""
    patterns = np.random.default_rng(0).random((10, 28, 28, 1), dtype=np.float32)
    random = np.random.default_rng(seed)
    classes = random.integers(10, size=count)
    noise = random.normal(size=(count, 28, 28, 1)).astype(np.float32)
    return patterns[classes] + noise, classes


def build_model():
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def main():
    hvd.init()
    x, y = images(2048, seed=1)
    share = slice(hvd.rank(), None, hvd.size())  # this worker's part of the data

    model = build_model()
    rate = 0.001 * hvd.size()  # Horovod's rule: as many times the rate as workers
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(rate)),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # all workers start with equal weights
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=1),
    ]
    model.fit(x[share], y[share], batch_size=32, epochs=3, callbacks=callbacks, verbose=0)

    if hvd.rank() == 0:
        loss, accuracy = model.evaluate(*images(1024, seed=2), verbose=0)
        print(f"keras on {hvd.size()} workers: loss {loss:.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
