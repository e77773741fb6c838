"""HOROVOD_AUTOTUNE=1: try several fusion thresholds while the script runs, and keep the best one.

    warm-up samples   discarded
    sample            5 measurements with one threshold; its score is their median
    measurement       lasts until some name has been reduced HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE
                      times; its score is bytes reduced per microsecond, summed over all names

Only rank 0 fuses operations, so rank 0 decides alone. The other ranks execute its answers, so the
threshold may change between any two answers.

Horovod also searches for a cycle time and tries hierarchies and the cache. Here there are no
cycles, and the layout of the hosts determines the algorithm, so one number is left, and a sweep
over a few values finds the best. If HOROVOD_FUSION_THRESHOLD is set, only its value is tried.
HOROVOD_AUTOTUNE_LOG is the file for Horovod's table: one row per sample, then the best row again.
"""

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from allstep.console.escape import print_notice
from allstep.engine.request import RequestSpec
from allstep.engine.settings import number
from allstep.errors import ConfigError

MB = 1 << 20
CANDIDATES = tuple(size * MB for size in (0, 1, 2, 4, 8, 16, 32, 64))
MEASUREMENTS = 5
_HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
    "tensor_fusion_threshold,score"
)
# Columns of parameters that are not tuned.
_UNCHANGED = "0,0,0,1,1"
# Names of unnamed operations never repeat, and must not fill the memory.
_MAX_NAMES = 10_000


class Sample(NamedTuple):
    """The result of one threshold: `fusion` in bytes, `score` in bytes per microsecond."""

    fusion: int
    score: float


class Log:
    """The table of samples.

    If writing fails, print one notice; the run continues without the table.
    """

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
        """Append one row; a no-op once writing has failed."""
        if self._has_failed:
            return
        try:
            with self._path.open("a") as file:
                file.write(f"{_UNCHANGED},{sample.fusion / MB:g},{sample.score:g}\n")
        except OSError as error:
            self._has_failed = True
            why = f"autotune's log {str(self._path)!r} cannot be written: {error.strerror}"
            print_notice(f"{why}; the log ends here, the run continues")


class Autotune:
    """The sweep over thresholds; `fusion` is the threshold to use now.

    `candidates`: thresholds in bytes. `warmup`: number of samples to discard. `steps`: how often a
    name is reduced in one measurement. `log`: the table for the samples.
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
        # The thresholds of the remaining samples.
        self._left = [candidates[0]] * warmup + list(candidates)
        self._warmup, self._steps = warmup, steps
        self._log, self._clock = log, clock
        self._scores: list[float] = []
        self._began: float | None = None
        self._begin(None)

    @property
    def is_done(self) -> bool:
        """Whether all thresholds have been tried; `fusion` is then the best of them."""
        return not self._left

    def reduced(self, specs: Sequence[RequestSpec]) -> int:
        """Record a fused reduction that has finished; return the threshold to use next."""
        if self._left:
            now = self._clock()
            # How long the first reduction took is unknown.
            if self._began is None:
                self._begin(now)
            else:
                self._count(specs, now)
        return self.fusion

    def _begin(self, now: float | None) -> None:
        """Begin a measurement at time `now`."""
        self._began = now
        self._num_bytes = 0
        self._times: Counter[str] = Counter()

    def _count(self, specs: Sequence[RequestSpec], now: float) -> None:
        assert self._began is not None
        self._num_bytes += sum(spec.nbytes for spec in specs)
        self._times.update(spec.name for spec in specs)
        if max(self._times[spec.name] for spec in specs) >= self._steps:
            self._scores.append(self._num_bytes / max(1e6 * (now - self._began), 1e-3))
            self._begin(now)
        elif len(self._times) > _MAX_NAMES:
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
    """Return the sweep that the environment requests of rank 0; None without it and on other ranks.

    `fusion`: the threshold in bytes to use if HOROVOD_FUSION_THRESHOLD is set.
    """
    env = os.environ if env is None else env
    if rank != 0 or not number("HOROVOD_AUTOTUNE", 0, env) > 0:
        return None
    steps = int(number("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 10, env))
    if steps < 1:
        raise ConfigError(
            f"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE={steps}: expected at least 1 step per measurement"
        )
    path = env.get("HOROVOD_AUTOTUNE_LOG", "")
    return Autotune(
        candidates=(fusion,) if env.get("HOROVOD_FUSION_THRESHOLD") else CANDIDATES,
        warmup=int(number("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 3, env)),
        steps=steps,
        log=Log(path) if path else None,
    )
