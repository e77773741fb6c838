"""Measure `fit` of Keras 2 on two workers: allstep, and TensorFlow's MultiWorkerMirroredStrategy.

    python benchmarks/mirrored_fit.py [--repetitions 9] [--model cnn|dense] [--json FILE]

`fit` of Keras 3 fails under that strategy, so `allstep bench step` compares with a loop written by
hand. With Keras 2 (`tf-keras`) `fit` itself runs. Contenders, each started in turn by `allstep run`
with one core per worker and 32 images per worker and step:

- two plain copies that do not communicate: 100%;
- `allstep.keras2`, DistributedOptimizer;
- MultiWorkerMirroredStrategy.

A turn is one epoch, after one that is not measured; its time is that of the slower worker.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

from rich.console import Console

from allstep.bench.result import Result, Row
from allstep.bench.script import parsed, positive
from allstep.process.python import run_module

PLAIN, OURS, MIRRORED = "plain copies", "allstep.keras2", "MultiWorkerMirrored"
BATCH, STEPS = 32, {"cnn": 200, "dense": 20}


def make_model(name: str) -> Any:
    import tf_keras as keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    if name == "cnn":
        body = [
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    else:
        widths = (4096, 8192, 2304)
        body = [layers.Flatten(), *(layers.Dense(width, activation="relu") for width in widths)]
        body.append(layers.Dense(1000))
    return keras.Sequential([keras.Input((28, 28, 1)), *body])


def compiled(name: str, wrap: Any = lambda optimizer: optimizer) -> Any:
    import tf_keras as keras

    model = make_model(name)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrap(keras.optimizers.SGD(0.001, momentum=0.9)), loss)
    return model


def train(contender: str, name: str, ports: list[int]) -> float:
    """Return the seconds of the second epoch, as one worker of a contender."""
    rank, batch = int(os.environ["ALLSTEP_RANK"]), BATCH
    if contender == MIRRORED:
        workers = [f"127.0.0.1:{port}" for port in ports]
        place = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        os.environ["TF_CONFIG"] = json.dumps(place)
    import tensorflow as tf

    if contender == MIRRORED:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        # It divides a global batch among the workers.
        batch *= len(ports)
        with strategy.scope():
            model = compiled(name)
    elif contender == OURS:
        import allstep.keras2 as hvd

        hvd.init()
        model = compiled(name, hvd.DistributedOptimizer)
    else:
        model = compiled(name)
    images = tf.random.stateless_uniform((batch, 28, 28, 1), (0, 1))
    data = tf.data.Dataset.from_tensors((images, tf.range(batch) % 10)).repeat(STEPS[name])
    policy = tf.data.Options()
    policy.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = data.with_options(policy)
    model.fit(data, epochs=1, verbose=0)
    began = time.perf_counter()
    model.fit(data, epochs=1, verbose=0)
    return time.perf_counter() - began


def turn(contender: str, name: str) -> float:
    """Return the seconds per step of the slower of two workers."""
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        ports = [str(each.getsockname()[1]) for each in (first, second)]
    worker = [sys.executable, __file__, "--worker", contender, "--model", name, "--ports", *ports]
    env = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [*run_module("allstep", "run", "-np", "2"), *worker],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise SystemExit(f"{contender} failed:\n{done.stderr}")
    seconds = [line.rpartition(" ")[2] for line in done.stdout.splitlines() if "SECONDS" in line]
    return max(map(float, seconds)) / STEPS[name]


def measure(repetitions: int, name: str) -> Result:
    seconds: dict[str, list[float]] = {each: [] for each in (PLAIN, OURS, MIRRORED)}
    for _ in range(repetitions):
        for contender, times in seconds.items():
            times.append(turn(contender, name))
    rows = tuple(Row(each, tuple(times)) for each, times in seconds.items())
    return Result("mirrored_fit", rows, (), {"plain": PLAIN, "mirrored": MIRRORED})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repetitions", type=positive, default=9)
    parser.add_argument("--model", choices=list(STEPS), default="cnn")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--ports", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parsed(parser)
    if options.worker:
        print("SECONDS", train(options.worker, options.model, options.ports), flush=True)
        sys.exit()
    result = measure(options.repetitions, options.model)
    Console().print(result.table())
    if options.json:
        options.json.write_text(result.to_json())
