"""How much `import allstep.keras` and `hvd.init()` add to the start of a Keras script.

    python benchmarks/import_time.py [--rounds 5] [--json FILE]

Each round starts, for each backend of Keras that is installed, a process that imports the
framework and Keras, and one that imports allstep.keras as well and calls `hvd.init()` as the only
worker. Both kinds take turns. The difference is taken within a round; its median and range are
printed. To reach: at most 2.5 s.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec

from allstep.bench.script import parsed, positive

_TARGET = 2.5
# The module of each backend's framework.
_BACKENDS = {"torch": "torch", "tensorflow": "tensorflow", "jax": "jax"}
_PLAIN = "import {module}, keras"
_OURS = f"{_PLAIN}; import allstep.keras as hvd; hvd.init()"


def seconds(script: str, backend: str) -> float:
    """Return the seconds of a process that runs a script."""
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", script.format(module=_BACKENDS[backend])]
    started = time.perf_counter()
    subprocess.run(command, env=env, check=True, timeout=120, capture_output=True)
    return time.perf_counter() - started


def measure(backends: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds without and with allstep, by backend; the first round does not count."""
    found: dict[str, dict[str, list[float]]] = {
        backend: {"plain": [], "allstep": []} for backend in backends
    }
    for number in range(rounds + 1):
        for backend, series in found.items():
            plain, ours = seconds(_PLAIN, backend), seconds(_OURS, backend)
            if number:
                series["plain"].append(plain)
                series["allstep"].append(ours)
    return found


def show(backend: str, series: dict[str, list[float]]) -> None:
    """Print the line of a backend."""
    added = [b - a for a, b in zip(series["plain"], series["allstep"], strict=True)]
    median = statistics.median(added)
    verdict = "met" if median <= _TARGET else "not met"
    print(
        f"{backend:<11}{statistics.median(series['plain']):7.2f} s plain"
        f"{median:+7.2f} s with allstep ({min(added):+.2f} to {max(added):+.2f}),"
        f" target {_TARGET} s: {verdict}"
    )


def main() -> None:
    """Measure and print all backends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=5, help="rounds (default: 5)")
    options = parsed(parser)
    installed = [name for name, module in _BACKENDS.items() if find_spec(module)]
    if not find_spec("keras"):
        parser.error("needs keras, which is not installed: pip install keras")
    found = measure(installed, options.rounds)
    for backend, series in found.items():
        show(backend, series)
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
