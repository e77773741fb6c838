"""Loaders with workers, and the threads, descriptors and processes that they have."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from allstep.data import Loader
from support.array_sources import Arrays, Singly, noise_transform, sample_images


def fds() -> int:
    """Return the number of open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def our_threads() -> list[str]:
    """Return the names of the loader's threads."""
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("allstep-loader")
    ]


def children() -> list[int]:
    """Return the pids of the loader's worker processes that are children of this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"worker_process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def loader(
    n: int = 60, kind: str = "threads", source: type[Arrays] = Singly, **options: Any
) -> Loader:
    """Return a loader over `n` small images, with two workers and random noise by default."""
    options = {"batch": 10, "workers": 2, "seed": 3, "transform": noise_transform(), **options}
    return Loader(source(sample_images(n), bad=options.pop("bad", ())), kind=kind, **options)


def seen(batches: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Return the sample numbers of each batch, and the images of all."""
    kept = list(batches)
    return [batch.samples.tolist() for batch in kept], torch.cat([batch.data for batch in kept])


def until(true: Callable[[], bool]) -> None:
    """Wait until `true()`; the timeout of the test ends a wait that never does."""
    while not true():
        time.sleep(0.005)
