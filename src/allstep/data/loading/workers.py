"""The choice of what fills the batches: the caller, threads, or processes. The user's setting
decides; without one, a measurement does.

Threads share all memory and start immediately, but only one of them runs Python at a time. The
operations of allstep spend their time in C without the GIL, but between two operations a thread
needs the GIL again: if another thread holds it, the thread sleeps, and waking up takes longer than
the Python code that it waited for. A user's function may hold the GIL all the time; and if images
are stored decoded, most of the remaining work is Python.

So one thread and then two threads process some samples. From the two times follow the serial
fraction of the work (Amdahl's law) and the efficiency of each of `count` threads:

```
time of two threads / of one     serial fraction     efficiency of 2 threads     of 8 threads
        0.50                            0%                  100%                     100%
        0.55                           10%                   91%                      59%
        0.65                           30%                   77%                      32%
```

Threads are chosen if their efficiency is at least `_MIN_EFFICIENCY`, otherwise processes. For a
dataset of fewer than `ENOUGH` samples it is not worth starting processes, except for a user's
function. Blocks of small arrays go to one thread, or to processes if these can open the source
themselves. Arrays that are only copied out of memory need no workers: the caller copies them.
"""

import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from allstep import machine
from allstep.data.loading.fill import Recipe, Rows, fill, image_shape, look
from allstep.data.loading.prefetch import Finish, Stop
from allstep.data.loading.processes import why_not_sendable
from allstep.data.loading.share import Share
from allstep.data.order import Numbers
from allstep.errors import ConfigError

Kind = Literal["auto", "threads", "processes"]

# Number of samples for the measurement.
ENOUGH = 256
# Seconds that one measurement should last: a shorter one is not reliable, a longer one delays the
# start.
_SECONDS = 0.05
# Number of measurements, of which the shortest counts.
_ROUNDS = 3
# Bytes that may be sent to each process: the description of a source, but not arrays in memory.
_LIGHT = 1e6
# Threads of lower efficiency are replaced by processes, whose efficiency is 1, but which cost 35 MB
# and 0.3 s each.
_MIN_EFFICIENCY = 0.9


@dataclass(frozen=True)
class Crew:
    """Number and kind of a loader's workers, and the reason; with `count` 0 the caller works."""

    count: int
    kind: Kind
    why: str

    def __str__(self) -> str:
        number = {0: "no workers", 1: "1 thread" if self.kind == "threads" else "1 process"}
        return f"{number.get(self.count, f'{self.count} {self.kind}')} ({self.why})"


def cores_per_rank(local_size: int) -> int:
    """Return the number of cores for this rank, one of `local_size` on the host.

    That is an equal share of the host's cores, or fewer if this process is bound to fewer.
    """
    total = machine.cpu_quota() or os.cpu_count() or 1
    return max(1, min(machine.allowed_cores(), int(total // local_size)))


def check(workers: int | str, kind: str) -> None:
    """Raise ConfigError if `workers` or `kind` is not a valid setting."""
    if workers != "auto" and not (isinstance(workers, int) and workers >= 0):
        raise ConfigError(f"workers is 'auto' or a whole number of at least 0, not {workers!r}")
    if kind not in ("auto", "threads", "processes"):
        raise ConfigError(f"kind is 'auto', 'threads' or 'processes', not {kind!r}")


def choose(workers: int | str, kind: Kind, cores: int, recipe: Recipe, numbers: Numbers) -> Crew:
    """Return the workers for the batches of `recipe`; `numbers` are samples to measure with."""
    if workers == 0:
        return Crew(0, "threads", "as asked")
    if workers == "auto" and kind == "auto" and recipe.transform is None and recipe.blocks:
        return Crew(0, "threads", "arrays are only copied")
    count = int(workers) if workers != "auto" else cores
    if kind != "auto":
        return Crew(count, kind, "as asked")
    if count == 1:
        return Crew(count, "threads", "one worker")
    if recipe.transform is None:
        return Crew(count, "threads", "nothing is computed")
    if recipe.blocks:
        return _for_blocks(count if workers != "auto" else 1, count, recipe, numbers)
    if recipe.transform.releases_gil and len(numbers) < ENOUGH:
        return Crew(count, "threads", "the transform releases the GIL")
    part = time_of_two_threads(recipe, numbers)
    why = f"two threads need {part:.2f} of the time of one"
    if efficiency(part, count) >= _MIN_EFFICIENCY:
        return Crew(count, "threads", why)
    if reason := why_not_sendable(recipe):
        return Crew(
            count,
            "threads",
            f"{why}, but the transform or the source cannot be sent to processes: {reason}",
        )
    return Crew(count, "processes", why)


def _for_blocks(num_threads: int, num_processes: int, recipe: Recipe, numbers: Numbers) -> Crew:
    """Return the workers for blocks of small images.

    Such work consists of many short calls of numpy: a second thread only competes for the GIL.
    """
    if len(numbers) < ENOUGH:
        return Crew(num_threads, "threads", "a small dataset")
    if why_not_sendable(recipe, _LIGHT):
        return Crew(
            num_threads,
            "threads",
            "threads compete for the GIL with blocks, and the source is too large to send",
        )
    return Crew(num_processes, "processes", "threads compete for the GIL with blocks")


def efficiency(part: float, count: int) -> float:
    """Return the throughput of each of `count` threads, relative to a thread that runs alone.

    `part` is the time of two threads as a fraction of the time of one.
    """
    serial = max(0.0, 2 * part - 1)
    return 1 / (1 + serial * (count - 1))


def time_of_two_threads(recipe: Recipe, numbers: Numbers) -> float:
    """Return the time of two threads for some samples, as a fraction of the time of one.

    All passes read the same samples into the same memory, both used before: page faults and first
    reads run without the GIL, and would make two threads look faster than they are later.
    """
    room = _room(recipe, numbers[:ENOUGH])
    whole = slice(0, _enough(recipe, numbers, room))
    middle = (whole.stop + 1) // 2
    halves = [slice(0, middle), slice(middle, whole.stop)]
    rounds = [
        (_seconds(recipe, numbers, room, [whole]), _seconds(recipe, numbers, room, halves))
        for _ in range(_ROUNDS)
    ]
    # The minimum is the time that other processes disturbed least.
    alone, together = min(one for one, _ in rounds), min(two for _, two in rounds)
    return together / max(alone, 1e-9)


def _enough(recipe: Recipe, numbers: Numbers, room: NDArray[Any] | None) -> int:
    """Return a number of samples whose processing takes long enough to be measured.

    The first sample is not timed, since it may import modules and open files.
    """
    limit = min(len(numbers), ENOUGH)
    _seconds(recipe, numbers, room, [slice(0, 1)])
    num = min(4, limit)
    while num < limit and _seconds(recipe, numbers, room, [slice(0, num)]) < _SECONDS:
        num = min(2 * num, limit)
    return num


def _seconds(
    recipe: Recipe, numbers: Numbers, room: NDArray[Any] | None, parts: list[slice]
) -> float:
    """Return the seconds to process the samples, with one thread for each slice in `parts`.

    For a single thread, the time in which other programs used its core is subtracted: on a busy
    machine two threads get twice as much CPU time as one, and would look faster even where the GIL
    keeps them from it.
    """
    waited: list[float] = []
    threads = [
        threading.Thread(
            target=_try, args=(recipe, numbers[part], None if room is None else room[part], waited)
        )
        for part in parts
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - started
    return taken - waited[0] if len(parts) == 1 else taken


def _try(recipe: Recipe, samples: Numbers, out: NDArray[Any] | None, waited: list[float]) -> None:
    try:
        fill(recipe, samples, out, recipe.draw(0, samples))
    except Exception:
        # The first batch raises it again.
        pass
    waited.append(seconds_in_run_queue())


def seconds_in_run_queue() -> float:
    """Return the seconds that this thread waited for a core; 0 if the kernel has no count."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _room(recipe: Recipe, samples: Numbers) -> NDArray[Any] | None:
    """Return memory for the images of `samples`.

    None if there is no transform, or if the size of its images is unknown.
    """
    if recipe.transform is None:
        return None
    try:
        shape, dtype = image_shape(recipe.transform, look(recipe.source, samples))
    except ConfigError:
        # The loader raises it again when it creates its machinery.
        return None
    return np.empty((len(samples), *shape), dtype)


def fill_chunk(share: Share, chunk: slice, stop: Stop) -> Rows:
    """Fill a chunk in this thread."""
    return fill(share.recipe, share.samples[chunk], share.rows_of(chunk), share.draws(chunk), stop)


def begin_chunk(share: Share, chunk: slice, stop: Stop) -> Finish:
    """Return a function that fills the chunk in the calling thread, as `prefetch` expects."""
    return partial(fill_chunk, share, chunk, stop)
