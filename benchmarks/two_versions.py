"""Compare the speed of two versions of the package.

    git worktree add /tmp/before ea9ae91~1
    python benchmarks/two_versions.py /tmp/before/src src --rounds 5

Each round measures both versions, in alternating order, on 2 workers. The output is the median of
each version, and of the ratio of both in one round, with its smallest and largest value. The speed
of the machine changes by the minute, so only the ratio is meaningful.

=========  ==================================================================================
launch     seconds of `allstep run -np 2 true`
start      seconds of `allstep train digits epochs=1`, almost all of it start and end
digits     samples per second of 20 epochs of the recipe digits
comm       microseconds of an allreduce of 1 KB, 1 MB and 16 MB
hvd        microseconds of `hvd.allreduce` of 1 KB
step       `allstep bench step --model small-cnn`: speed of DistributedOptimizer and share_weights,
           as a share of independent copies in the neighboring turn
data       images per second of a loader over JPEG files
=========  ==================================================================================
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_COMM = """
import json, sys, time, torch, allstep
import torch.distributed as dist
import allstep.torch as hvd
world = allstep.init()
hvd.init()
def median(act, count):
    for _ in range(count // 5 + 1):
        act()
    times = []
    for _ in range(count):
        dist.barrier()
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return sorted(times)[count // 2] * 1e6
found = {}
for name, numel, count in (("1 KB", 256, 400), ("1 MB", 1 << 18, 200), ("16 MB", 1 << 22, 30)):
    tensor = torch.ones(numel)
    found[f"comm {name}"] = median(lambda: dist.all_reduce(tensor), count)
small = torch.ones(256)
found["hvd 1 KB"] = median(lambda: hvd.allreduce(small, name="small"), 400)
if world.rank == 0:
    print(json.dumps(found), flush=True)
"""

_DATA = """
import json, sys, time
from allstep.data import Loader, Transform, open_source
from allstep.data.augment import RandomResizedCrop
transform = Transform(RandomResizedCrop(224))
loader = Loader(open_source(sys.argv[1]), transform, batch=64, seed=0, workers=2)
for _ in loader.batches(0, 128):
    pass
began, count = time.perf_counter(), 0
for batch in loader.batches(0, 3072):
    count += batch.weight
print(json.dumps({"data": count / (time.perf_counter() - began)}))
"""


def environment(source: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}


def run(source: Path, *command: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(source),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        sys.exit(
            f"{source}: {' '.join(command)}: exit status {done.returncode}\n{done.stderr[-2000:]}"
        )
    return done.stdout


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measure(source: Path, images: Path) -> dict[str, float]:
    """Return all figures of one version, once."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        train = ("-m", "allstep", "train", "digits", "--workers", "2")
        found = {
            "launch": timed(
                lambda: run(source, "-m", "allstep", "run", "-np", "2", "true", cwd=folder)
            ),
            "start": timed(lambda: run(source, *train, "epochs=1", "--out", "short", cwd=folder)),
        }
        run(source, *train, "epochs=20", "--out", "long", cwd=folder)
        lines = [
            json.loads(line) for line in (folder / "long" / "run.jsonl").read_text().splitlines()
        ]
        found["digits"] = next(line["images_per_second"] for line in lines if line["kind"] == "end")
        (folder / "comm.py").write_text(_COMM)
        printed = run(
            source, "-m", "allstep", "run", "-np", "2", sys.executable, "comm.py", cwd=folder
        )
        found |= json.loads(printed[printed.index("{") :])
        found |= step_speeds(source, folder)
        (folder / "data.py").write_text(_DATA)
        return found | json.loads(run(source, "data.py", str(images), cwd=folder))


def step_speeds(source: Path, folder: Path) -> dict[str, float]:
    """Return the speeds of the two optimizers in `allstep bench step`."""
    bench = ("-m", "allstep", "bench", "step", "--model", "small-cnn", "-r", "5", "--json", "-")
    printed = json.loads(run(source, *bench, cwd=folder))
    speeds = {row["name"]: row["speed"] for row in printed["rows"]}
    return {f"step {name}": speeds[name] for name in ("DistributedOptimizer", "share_weights")}


def make_images(folder: Path, count: int = 256) -> None:
    """Write JPEG files of the usual size, in two classes."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(count):
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        coarse = random.integers(0, 256, (24, 32, 3), np.uint8)
        Image.fromarray(coarse).resize((500, 375)).save(place / f"{number}.jpg", quality=90)


HIGHER_IS_BETTER = ("digits", "data", "step")


def table(before: list[dict[str, float]], after: list[dict[str, float]]) -> None:
    print(f"{'':<28}{'before':>12}{'after':>12}   time after / before, median (least to most)")
    for name in before[0]:
        old, new = [each[name] for each in before], [each[name] for each in after]
        ratios = sorted(
            o / n if name.startswith(HIGHER_IS_BETTER) else n / o
            for o, n in zip(old, new, strict=True)
        )
        middle = statistics.median(ratios)
        print(
            f"{name:<28}{statistics.median(old):>12.4g}{statistics.median(new):>12.4g}   "
            f"{middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("before", type=Path, help="folder with the package allstep, such as src")
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    found: dict[Path, list[dict[str, float]]] = {asked.before: [], asked.after: []}
    with tempfile.TemporaryDirectory() as place:
        make_images(Path(place))
        for number in range(asked.rounds):
            order = [asked.before, asked.after] if number % 2 else [asked.after, asked.before]
            for source in order:
                found[source].append(measure(source, Path(place)))
            print(f"round {number + 1} of {asked.rounds} done", file=sys.stderr)
    table(found[asked.before], found[asked.after])


if __name__ == "__main__":
    main()
