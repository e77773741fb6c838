"""Who fills the batches: nobody but the caller, threads, or processes; chosen by what was asked
for, else by measurement.

Threads share everything and start at once, but only one of them runs Python at a time. Our own
operations spend their time in C without the GIL, but between two of them a thread needs it again:
one that finds it taken sleeps, and waking up takes longer than the Python that it waited for. A
user's function may hold the GIL; and where images are stored decoded, little is left but Python.

So some samples are made ready by one thread and by two, and from the two times follows which share
of the work runs alone (Amdahl), and what each of `count` threads would deliver:

```
two threads need 0.50 of the time of one     0% alone      each of 2 delivers 100%, of 8  100%
                 0.55                        10%                               91%         59%
                 0.65                        30%                               77%         32%
```

Processes do the work unless each thread delivers `_WORTH` of what it does alone. A set of fewer
than `ENOUGH` samples is not worth starting processes for, except for a user's function. Blocks of
small arrays go to one thread, or to processes that can open the source themselves. Where arrays are
only copied out of memory there is nothing to share out: the caller does it by the way.
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

ENOUGH = 256  # samples to try the choice with
_SECONDS = 0.05  # that a measurement should last: less says nothing, more keeps the user waiting
_ROUNDS = 3
# bytes that may be sent to each process: the description of a source, but not arrays in memory
_LIGHT = 1e6
# Of what it does alone each thread must deliver this share. Processes deliver all, and cost 35 MB
# and 0.3 s each.
_WORTH = 0.9


@dataclass(frozen=True)
class Crew:
    """Who works: `count` threads or processes, and why; 0 is the caller alone."""

    count: int
    kind: Kind
    why: str

    def __str__(self) -> str:
        number = {0: "no workers", 1: "1 thread" if self.kind == "threads" else "1 process"}
        return f"{number.get(self.count, f'{self.count} {self.kind}')} ({self.why})"


def cores_per_rank(local_size: int) -> int:
    """Cores for each of `local_size` ranks: all that we may use when we are bound to no more than
    our share, else our share."""
    total = machine.cpu_quota() or os.cpu_count() or 1
    return max(1, min(machine.allowed_cores(), int(total // local_size)))


def check(workers: int | str, kind: str) -> None:
    """Refuses what cannot be meant."""
    if workers != "auto" and not (isinstance(workers, int) and workers >= 0):
        raise ConfigError(f"workers is 'auto' or a number from 0, not {workers!r}")
    if kind not in ("auto", "threads", "processes"):
        raise ConfigError(f"kind is 'auto', 'threads' or 'processes', not {kind!r}")


def choose(workers: int | str, kind: Kind, cores: int, recipe: Recipe, numbers: Numbers) -> Crew:
    """Who fills the batches of `recipe`; `numbers` are samples to try it with."""
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
        return Crew(count, "threads", "the transform leaves Python free")
    part = time_of_two_threads(recipe, numbers)
    why = f"two threads need {part:.2f} of the time of one"
    if efficiency(part, count) >= _WORTH:
        return Crew(count, "threads", why)
    if reason := why_not_sendable(recipe):
        return Crew(
            count,
            "threads",
            f"{why}, but the transform or the source cannot be sent to processes: {reason}",
        )
    return Crew(count, "processes", why)


def _for_blocks(num_threads: int, num_processes: int, recipe: Recipe, numbers: Numbers) -> Crew:
    """Blocks of small images are many short calls of numpy: a second thread only takes the GIL
    from the first."""
    if len(numbers) < ENOUGH:
        return Crew(num_threads, "threads", "a small set")
    if why_not_sendable(recipe, _LIGHT):
        return Crew(
            num_threads,
            "threads",
            "threads hinder each other at blocks, and the source is no light thing to send",
        )
    return Crew(num_processes, "processes", "threads hinder each other at blocks")


def efficiency(part: float, count: int) -> float:
    """What each of `count` threads delivers of one alone, when two need `part` of the time of one."""
    serial = max(0.0, 2 * part - 1)
    return 1 / (1 + serial * (count - 1))


def time_of_two_threads(recipe: Recipe, numbers: Numbers) -> float:
    """How long two threads need for some samples, as part of the time that one needs.

    All passes fill the same memory from the same part of the source, touched before: page faults
    and first reads run without the GIL, and would let two threads look better than they are later
    on.
    """
    room = _room(recipe, numbers[:ENOUGH])
    whole = slice(0, _enough(recipe, numbers, room))
    middle = (whole.stop + 1) // 2
    halves = [slice(0, middle), slice(middle, whole.stop)]
    rounds = [
        (_seconds(recipe, numbers, room, [whole]), _seconds(recipe, numbers, room, halves))
        for _ in range(_ROUNDS)
    ]
    # The shortest of each: what no other process disturbed.
    alone, together = min(one for one, _ in rounds), min(two for _, two in rounds)
    return together / max(alone, 1e-9)


def _enough(recipe: Recipe, numbers: Numbers, room: NDArray[Any] | None) -> int:
    """How many samples last long enough to be timed.

    The first, which may import and open things, does not count.
    """
    most = min(len(numbers), ENOUGH)
    _seconds(recipe, numbers, room, [slice(0, 1)])
    num = min(4, most)
    while num < most and _seconds(recipe, numbers, room, [slice(0, num)]) < _SECONDS:
        num = min(2 * num, most)
    return num


def _seconds(
    recipe: Recipe, numbers: Numbers, room: NDArray[Any] | None, parts: list[slice]
) -> float:
    """The time of one thread for each of `parts` of the samples.

    A thread alone is not charged the time in which other programs had its core: on a busy machine
    two threads get twice as much of the cores as one, and would seem to help even where they
    cannot.
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
    except Exception:  # it is raised again when a batch is made
        pass
    waited.append(seconds_in_run_queue())


def seconds_in_run_queue() -> float:
    """How long this thread could have run and had no core; 0 where the kernel does not count it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _room(recipe: Recipe, samples: Numbers) -> NDArray[Any] | None:
    """Memory for the images of `samples`; None where they have none or it cannot be known how
    large they are."""
    if recipe.transform is None:
        return None
    try:
        shape, dtype = image_shape(recipe.transform, look(recipe.source, samples))
    except ConfigError:  # it is raised again when the loader is made ready
        return None
    return np.empty((len(samples), *shape), dtype)


def fill_chunk(share: Share, chunk: slice, stop: Stop) -> Rows:
    """Fills a chunk in this thread."""
    return fill(share.recipe, share.samples[chunk], share.rows_of(chunk), share.draws(chunk), stop)


def begin_chunk(share: Share, chunk: slice, stop: Stop) -> Finish:
    """The same for `prefetch`: all of the work is in its end."""
    return partial(fill_chunk, share, chunk, stop)
