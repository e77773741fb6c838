"""Compare the speed of the launcher's output in several versions.

    git worktree add /tmp/before 4f65a92~1
    python benchmarks/launcher_lines.py /tmp/before/src src

Two ranks print 30 MB of lines of 100 bytes each through `allstep run`, into a pipe that this
process reads. The versions take turns. The output is the seconds of each turn, from the first line
to the last, their medians, and the ratio of each version to the first.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

_RANKS = 2
_LINE = "x" * 95 + "\n"
# Text output would make one write per line, but the launcher has to be the slower side.
_WRITER = """
import os, sys
data, count = sys.argv[1].encode().decode("unicode_escape").encode() * 640, int(sys.argv[2])
for _ in range(count):
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(1, rest):]
"""


def seconds_of(source: Path, megabytes: int) -> float:
    """Return the seconds from the first line to the last of a run of the allstep in `source`."""
    count = megabytes * 1_000_000 // (len(_LINE) * 640)
    writer = [sys.executable, "-c", _WRITER, _LINE.encode("unicode_escape").decode(), str(count)]
    command = [sys.executable, "-m", "allstep", "run", "-np", str(_RANKS), *writer]
    env = {**os.environ, "PYTHONPATH": str(source.resolve())}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    nbytes, began = 0, 0.0
    while chunk := os.read(process.stdout.fileno(), 1 << 20):
        began = began or time.monotonic()
        nbytes += len(chunk)
    seconds = time.monotonic() - began
    # The launcher writes `[0] ` before each line.
    expected = _RANKS * count * 640 * (len(_LINE) + 4)
    if process.wait() or nbytes != expected:
        sys.exit(f"{source}: exit status {process.returncode}, {nbytes} bytes of {expected}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sources", nargs="+", type=Path, help="folders with the package allstep")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=30, help="of each rank")
    asked = parser.parse_args()
    times: dict[Path, list[float]] = {source: [] for source in asked.sources}
    for _ in range(asked.turns):
        for source in asked.sources:
            times[source].append(seconds_of(source, asked.megabytes))
    first = statistics.median(times[asked.sources[0]])
    for source, found in times.items():
        median = statistics.median(found)
        speed = _RANKS * asked.megabytes / median
        each = " ".join(f"{seconds:.2f}" for seconds in found)
        ratio = f"{median / first:.2f} of the first"
        print(f"{source}: {median:.2f} s, {speed:.0f} MB/s, {ratio} ({each})")


if __name__ == "__main__":
    main()
