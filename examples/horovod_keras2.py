"""Train a small convolutional model with Keras 2 on several workers, as a Horovod script of 2020.

TF_USE_LEGACY_KERAS=1 allstep run --as-horovod -np 2 python examples/horovod_keras2.py
"""

import sys

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf


def images(count, seed):
    """Return images of ten classes, each class a pattern of its own with noise, and the classes."""
    patterns = np.random.default_rng(0).random((10, 28, 28, 1), dtype=np.float32)
    random = np.random.default_rng(seed)
    classes = random.integers(10, size=count)
    noise = random.normal(size=(count, 28, 28, 1)).astype(np.float32)
    return patterns[classes] + noise, classes


def train(make_optimizer):
    """Return a model that was trained by all workers with this kind of Adam."""
    x, y = images(2048, seed=1)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(2048).batch(32)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(16, [3, 3], activation="relu", input_shape=(28, 28, 1)),
            tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    scaled_lr = 0.001 * hvd.size()
    opt = make_optimizer(scaled_lr)
    opt = hvd.DistributedOptimizer(
        opt, backward_passes_per_step=1, average_aggregated_gradients=True
    )
    model.compile(
        loss=tf.losses.SparseCategoricalCrossentropy(),
        optimizer=opt,
        metrics=["accuracy"],
        experimental_run_tf_function=False,
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=1, verbose=1),
    ]
    steps = 96 // hvd.size()
    model.fit(dataset, steps_per_epoch=steps, callbacks=callbacks, epochs=2, verbose=0)
    return model


def main():
    hvd.init()
    kinds = {"Adam": tf.keras.optimizers.Adam, "legacy.Adam": tf.keras.optimizers.legacy.Adam}
    for name in sys.argv[1:] or kinds:
        model = train(kinds[name])
        if hvd.rank() == 0:
            loss, accuracy = model.evaluate(*images(1024, seed=2), verbose=0)
            print(f"{name} on {hvd.size()} workers: loss {loss:.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
