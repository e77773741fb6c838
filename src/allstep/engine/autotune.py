"""HOROVOD_AUTOTUNE=1: try fusion thresholds while the script runs, and keep the best.

    warm-up samples   thrown away a sample          5 measurements with one threshold; its score is
    their median a measurement     until some name has been reduced
    HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE times; bytes reduced per microsecond, all told

Rank 0 decides alone, since it alone fuses: the others do what its answers say, so a threshold may
change between any two of them. Horovod also searches for a cycle time and tries hierarchies and the
cache. Here there are no cycles, and the way between hosts is chosen by the layout, so one number is
left, and a plain sweep finds the best of a few values of it. One set by HOROVOD_FUSION_THRESHOLD is
the only one that is tried. HOROVOD_AUTOTUNE_LOG is a file for Horovod's table: a row for each
sample, and the best again at the end.
"""

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from allstep.console.escape import print_notice
from allstep.engine.request import Ask
from allstep.engine.settings import number
from allstep.errors import ConfigError

MB = 1 << 20
CANDIDATES = tuple(size * MB for size in (0, 1, 2, 4, 8, 16, 32, 64))
MEASUREMENTS = 5
_HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
    "tensor_fusion_threshold,score"
)
_UNCHANGED = "0,0,0,1,1"  # the columns that nothing is tried for
_MOST_NAMES = (
    10_000  # names that never come again (those of unnamed operations) must not fill the memory
)


class Sample(NamedTuple):
    """What came of one threshold: bytes, and bytes per microsecond."""

    fusion: int
    score: float


class Log:
    """The table. When it cannot be written any more, that is said once and the run goes on."""

    def __init__(self, path: str) -> None:
        self._path = Path(path).absolute()
        self._has_failed = False
        try:
            self._path.write_text(_HEADER + "\n")
        except OSError as error:
            raise ConfigError(
                f"HOROVOD_AUTOTUNE_LOG={path!r} cannot be written: {error.strerror}"
            ) from error

    def add(self, sample: Sample) -> None:
        if self._has_failed:
            return
        try:
            with self._path.open("a") as file:
                file.write(f"{_UNCHANGED},{sample.fusion / MB:g},{sample.score:g}\n")
        except OSError as error:
            self._has_failed = True
            why = f"autotune's log {str(self._path)!r} cannot be written: {error.strerror}"
            print_notice(f"{why}; it ends here, the run goes on")


class Autotune:
    """The sweep. `fusion` is the threshold to use now.

    warmup: samples that are thrown away. steps: of a measurement. log: where to write the samples.
    """

    def __init__(
        self,
        candidates: Sequence[int] = CANDIDATES,
        warmup: int = 3,
        steps: int = 10,
        log: Log | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fusion = candidates[0]
        self.samples: list[Sample] = []
        self._left = [candidates[0]] * warmup + list(candidates)  # thresholds to take samples with
        self._warmup, self._steps = warmup, steps
        self._log, self._clock = log, clock
        self._scores: list[float] = []
        self._began: float | None = None
        self._begin(None)

    @property
    def is_done(self) -> bool:
        """Whether all have been tried; `fusion` is the best of them then."""
        return not self._left

    def reduced(self, asks: Sequence[Ask]) -> int:
        """These have been reduced, as one. The threshold to use from now on."""
        if self._left:
            now = self._clock()
            if self._began is None:  # how long the first one took is not known
                self._begin(now)
            else:
                self._count(asks, now)
        return self.fusion

    def _begin(self, now: float | None) -> None:
        """A measurement."""
        self._began = now
        self._num_bytes = 0
        self._times: Counter[str] = Counter()

    def _count(self, asks: Sequence[Ask], now: float) -> None:
        assert self._began is not None
        self._num_bytes += sum(ask.nbytes for ask in asks)
        self._times.update(ask.name for ask in asks)
        if max(self._times[ask.name] for ask in asks) >= self._steps:
            self._scores.append(self._num_bytes / max(1e6 * (now - self._began), 1e-3))
            self._begin(now)
        elif len(self._times) > _MOST_NAMES:
            self._begin(now)
        if len(self._scores) == MEASUREMENTS:
            self._take(Sample(self.fusion, statistics.median(self._scores)))
            self._scores.clear()

    def _take(self, sample: Sample) -> None:
        self._left.pop(0)
        if self._warmup:
            self._warmup -= 1
        else:
            self.samples.append(sample)
            self._write(sample)
        self.fusion = self._left[0] if self._left else self._best().fusion
        if not self._left:
            self._write(self._best())

    def _write(self, sample: Sample) -> None:
        if self._log is not None:
            self._log.add(sample)

    def _best(self) -> Sample:
        return max(self.samples, key=lambda sample: sample.score)


def read_autotune(rank: int, fusion: int, env: Mapping[str, str] | None = None) -> Autotune | None:
    """What the environment asks for, on rank 0; None when it asks for nothing. fusion: the
    threshold, if the environment sets it."""
    env = os.environ if env is None else env
    if rank != 0 or not number("HOROVOD_AUTOTUNE", 0, env) > 0:
        return None
    steps = int(number("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 10, env))
    if steps < 1:
        raise ConfigError(
            f"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE={steps}: a measurement needs 1 step or more"
        )
    path = env.get("HOROVOD_AUTOTUNE_LOG", "")
    return Autotune(
        candidates=(fusion,) if env.get("HOROVOD_FUSION_THRESHOLD") else CANDIDATES,
        warmup=int(number("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 3, env)),
        steps=steps,
        log=Log(path) if path else None,
    )
