"""Batches for training: this rank's share of each global batch, read, decoded and augmented ahead
of time.

```
order.plan           the samples of each batch, a pure function of (seed, epoch, position);
   |                 or `claims`, for a loop over claims
share.Share          one share, cut into chunks, with rows in recycled batch memory (memory)
   |
pipeline.Machinery   threads or processes fill the chunks of at most `ahead` shares
   |                 (prefetch, fill, workers, processes, worker_process)
loader.Loader        drops bad samples (quarantine), copies to the device, runs the transform's
   |                 batch operations
Batch
```

The position, a number of samples of the run, is the loader's whole state: `for batch in loader`
continues where a run with any number of workers stopped. It counts samples that were delivered, not
those read ahead. Each sample occurs once in an epoch. A bad sample makes its batch one sample
smaller; it does not shift the samples of other batches.
"""

import logging
import operator
import os
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allstep.data import order
from allstep.data.augment.transform import Transform
from allstep.data.loading import fill, workers
from allstep.data.loading.batch import Batch, DeviceCopier, as_it_is, images_first, to_tensor
from allstep.data.loading.claimed_shares import shares_of_claims
from allstep.data.loading.fill import Recipe
from allstep.data.loading.pipeline import Machinery
from allstep.data.loading.quarantine import Quarantine, WholeEpoch, default_budget, path_of_rank
from allstep.data.loading.share import Filled, Share
from allstep.data.loading.workers import Kind
from allstep.data.order import Partition, Reader, Span, Weights
from allstep.data.sources.source import Source
from allstep.errors import ConfigError, DataError
from allstep.world import World

__all__ = ["Batch", "Loader"]

_LOG = logging.getLogger("allstep.data")


class Loader:
    """Batches of `source`, in an order that depends on `seed` and the epoch.

    - `transform`: operations on images and batches; None (default) returns the source's arrays.
    - `batch`: samples of a global batch, over all ranks; or `batch_per_worker`: samples per rank.
      Exactly one of the two is required.
    - `world`: rank and size of this process (default: a single process).
    - `seed`: key of the order and of the augmentation (default 0); None keeps the order of the
      source, for evaluation.
    - `partition`: how ranks divide the samples, "share" (default) or "whole" (see `order`).
    - `shares`: the parts of a global batch that the ranks have: "even" (default), or one positive
      number per rank, such as [3, 1] for three quarters and one quarter.
    - `numbers`: the samples of the source to use, by number (default: all).
    - `workers`: number of loader threads or processes; 0 does the work in the caller; "auto"
      (default) is at most the number of this rank's cores.
    - `kind`: "threads", "processes" or "auto" (default), which measures what is faster.
    - `ahead`: batches to prepare ahead of time (default: 2 to 8, from the number of workers).
    - `strict`: raise an error at the first bad sample. Otherwise bad samples are skipped, up to
      `budget` of them (default: the larger of 100 and 0.1% of the samples), and listed in the
      file `quarantine` (default: not listed). Each rank has a file of its own; `writer` is its
      number in the name (default: the rank), for a process that may get another rank.
    - `device`: device of the batches (default: CPU).
    - `fields`: names of further features to return in `Batch.fields`.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform | None = None,
        *,
        batch: int | None = None,
        batch_per_worker: int | None = None,
        world: World | None = None,
        seed: int | None = 0,
        partition: Partition = "share",
        shares: Sequence[int] | str = "even",
        numbers: order.Numbers | None = None,
        workers: int | str = "auto",
        kind: Kind = "auto",
        ahead: int | None = None,
        strict: bool = False,
        budget: int | None = None,
        quarantine: Path | str | None = None,
        writer: int | None = None,
        device: torch.device | str | None = None,
        fields: Sequence[str] = (),
    ) -> None:
        world = world or World.alone()
        seed = None if seed is None else _whole("seed", seed)
        self.source, self.transform, self.seed = source, transform, seed
        self.numbers = None if numbers is None else order.some_of(numbers, len(source))
        self.num_samples = len(source) if self.numbers is None else len(self.numbers)
        self.position = 0
        self._world, self._reader = world, _reader(self.num_samples, seed, world, partition)
        self.batch = _global_batch(batch, batch_per_worker, world.size)
        self.shares = shares
        self._workers, self._kind = _checked(workers, kind, ahead), kind
        self._ahead, self._fields = ahead, tuple(fields)
        self._to_device = DeviceCopier(device)
        self._writer = world.rank if writer is None else writer
        budget = default_budget(self.num_samples) if budget is None else budget
        self._quarantine = Quarantine(budget, strict=strict)
        if quarantine is not None:
            self.list_bad_samples(quarantine)
        self._ready: Machinery | None = None

    @property
    def batch(self) -> int:
        """Return the number of samples of one global batch.

        A new value takes effect with the next batch, also within an epoch.
        """
        return self._batch

    @batch.setter
    def batch(self, batch: int) -> None:
        self._batch = _whole("batch", batch)
        if self._batch < 1:
            raise ConfigError(f"batch={batch}: expected at least 1 sample")

    @property
    def shares(self) -> Weights:
        """Return the parts of a global batch that the ranks have, one number per rank.

        A new value takes effect with the next batch, also within an epoch. All ranks must set it
        between the same two batches. Setting "even" sets equal numbers.
        """
        return self._reader.weights

    @shares.setter
    def shares(self, shares: Sequence[int] | str) -> None:
        weights = _weights(shares, self._world.size)
        self._reader = self._reader._replace(weights=weights)

    @property
    def position(self) -> int:
        """Return the number of samples of the run delivered so far, over all ranks.

        Setting it ends a loop over the loader that is under way.
        """
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        self._position = _not_negative("position", position)

    @property
    def num_bad(self) -> int:
        """Return the number of bad samples that this rank skipped.

        Bad samples that an earlier run wrote into the same quarantine list are included.
        """
        return self._quarantine.num_bad

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return -(-self.num_samples // self.batch)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from `position` to the end of its epoch; advance `position` with each.

        The loop ends early if other code sets `position`.
        """
        if not self.num_samples:
            return
        with closing(self._stream(self.position, self._epoch_end(self.position))) as stream:
            for batch, end in stream:
                self.position = end
                yield batch
                del batch
                if self.position != end:
                    return

    def batches(self, position: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Return the batches from `position` to `stop`; the loader's own position stays unchanged.

        `position` and `stop` count samples of the run. The default of `stop` is the end of the
        epoch that `position` is in.
        """
        position = _not_negative("position", position)
        stop = self._epoch_end(position) if stop is None else _whole("stop", stop)
        return self._only_batches(position, stop)

    def _only_batches(self, position: int, stop: int) -> Iterator[Batch]:
        with closing(self._stream(position, stop)) as stream:
            for batch, _ in stream:
                yield batch
                del batch

    def claimed(self, claims: Iterable[tuple[int, int]], largest: int) -> Generator[Batch]:
        """Yield a batch for each of `claims`, whichever rank this is; `largest` is their most.

        A claim is a start and a number of samples at positions of the run, within one epoch. Claims
        are requested ahead of time, up to `ahead` of them.
        """
        machinery = self._machinery()
        shares = shares_of_claims(
            claims, self._reader, self._named, machinery.recipe, machinery.layout(largest)
        )
        with closing(machinery.run(shares)) as filled_shares:
            for span, filled in filled_shares:
                batch = self._to_batch(span, filled)
                del filled
                yield batch
                del batch

    def place(self, world: World) -> None:
        """Take an even share of another rank, or of a world of another size, in the next loop.

        The loader keeps its workers, its batch and its list of bad samples. A loop that is under
        way must be ended first.
        """
        self._reader = _reader(self.num_samples, self.seed, world, self._reader.partition)
        self._world, self.shares = world, "even"

    def list_bad_samples(self, quarantine: Path | str) -> None:
        """List bad samples in the file `quarantine` from now on; those in it count as well."""
        old = self._quarantine
        path = path_of_rank(quarantine, self._writer)
        self._quarantine = Quarantine(old.budget, strict=old.strict, path=path)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the settings that a loader must share to continue from it."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`, which `state_dict` returned.

        The dataset, seed and partition must be those of the earlier loader; the number of workers
        and the batch may differ. Raises DataError otherwise.
        """
        for name, ours in self._identity().items():
            if state.get(name, ours) != ours:
                raise DataError(
                    f"the loader's state was saved with {name}={state[name]!r}, this loader has"
                    f" {name}={ours!r}: its position {state['position']} would name other samples;"
                    " use the dataset and the seed of the earlier run"
                )
        self.position = state["position"]

    def describe(self) -> str:
        """Return one line: samples, batch, transform and the loader's workers."""
        steps = "as they are" if self.transform is None else repr(self.transform)
        rank, size = self._world.rank, self._world.size
        mine = f", of which this is rank {rank} of {size}" if size > 1 else ""
        batches = f"{self.num_samples} samples in batches of {self.batch}{mine}"
        return f"{batches}; {steps}; {self._machinery().crew}"

    def close(self) -> None:
        """End the loader's worker processes, if any; deleting the loader does so too."""
        if self._ready is not None:
            self._ready.close()
        self._ready = None

    def _epoch_end(self, position: int) -> int:
        return (position // self.num_samples + 1) * self.num_samples if self.num_samples else 0

    def _identity(self) -> dict[str, Any]:
        return {
            "num_samples": self.num_samples,
            "seed": self.seed,
            "partition": self._reader.partition,
        }

    def _stream(self, position: int, stop: int) -> Generator[tuple[Batch, int], None, None]:
        """Yield batches, each with the position after it.

        What was read ahead is discarded when the batch size or the shares change.
        """
        whole_epoch = WholeEpoch(self.num_samples)
        while self.num_samples and position < stop:
            size, weights = self.batch, self.shares
            with closing(self._shares(position, stop, size)) as filled_shares:
                for span, filled in filled_shares:
                    position = span.end
                    batch = self._to_batch(span, filled)
                    whole_epoch.check(span.start, span.stop, filled.bad, batch.weight)
                    del filled
                    yield batch, position
                    del batch
                    if (self.batch, self.shares) != (size, weights):
                        break

    def _shares(
        self, position: int, stop: int, size: int
    ) -> Generator[tuple[Span, Filled], None, None]:
        machinery = self._machinery()
        # The largest that this rank's share can be: of a whole batch, rounded up.
        mine, total = self.shares[self._world.rank], sum(self.shares)
        layout = machinery.layout(-(-size * mine // total))
        plan = order.plan(self._reader, position, stop, size)
        shares = (Share(machinery.recipe, layout, span, self._named(mine)) for span, mine in plan)
        return machinery.run(shares)

    def _named(self, numbers: order.Numbers) -> order.Numbers:
        return numbers if self.numbers is None else self.numbers[numbers]

    def _machinery(self) -> Machinery:
        if self._ready is None or self._ready.pid != os.getpid():
            self._ready = self._new_machinery()
        return self._ready

    def _new_machinery(self) -> Machinery:
        some = self._named(np.arange(min(self.num_samples, workers.ENOUGH)))
        blocks = not self._fields and fill.gives_blocks(self.source, self.transform, some)
        recipe = Recipe(self.source, self.transform, self.seed or 0, self._fields, blocks)
        like = fill.look(self.source, some)
        fill.check_fit(recipe, like)
        cores = workers.cores_per_rank(self._world.local_size)
        crew = workers.choose(self._workers, self._kind, cores, recipe, some)
        _LOG.info("loader: %s", crew)
        machinery = Machinery(recipe, crew, like, self._ahead, pin=self._to_device.pins)
        weakref.finalize(self, machinery.close)
        return machinery

    def _to_batch(self, span: Span, filled: Filled) -> Batch:
        for bad in filled.bad:
            self._quarantine.note(bad, span.epoch)
        data = as_it_is(filled.data) if self.transform is None else images_first(filled.data)
        data, target = self._to_device(data), self._to_device(to_tensor(filled.target))
        if self.transform is not None and filled.draws is not None:
            data, target = self.transform.on_batch(
                data, target, filled.draws, len(self.source.classes) or None
            )
        weight = len(filled.samples)
        return Batch(data, target, filled.samples, weight, span.epoch, span.position, filled.fields)


def _checked(count: int | str, kind: str, ahead: int | None) -> int | str:
    workers.check(count, kind)
    if ahead is not None and ahead < 1:
        raise ConfigError(
            f"ahead={ahead}: expected at least 1 batch; workers=0 loads no batch ahead of time"
        )
    return count


def _reader(n: int, seed: int | None, world: World, partition: Partition) -> Reader:
    if partition not in ("share", "whole"):
        raise ConfigError(f"partition is 'share' or 'whole', not {partition!r}")
    if partition == "whole" and seed is None:
        raise ConfigError(
            "partition='whole' requires a seed, since each rank has an order of its own"
        )
    return Reader(n, seed, world.rank, world.size, partition)


def _weights(shares: Sequence[int] | str, size: int) -> Weights:
    if shares == "even":
        return order.even(size)
    if isinstance(shares, str):
        hint = "; only `allstep train` measures the workers" if shares == "speed" else ""
        raise ConfigError(
            f"shares={shares!r}: expected 'even' or one positive number per worker{hint}"
        )
    return order.check_weights(shares, size)


def _global_batch(batch: int | None, per_worker: int | None, size: int) -> int:
    if (batch is None) == (per_worker is None):
        found = f"batch={batch}, batch_per_worker={per_worker}"
        raise ConfigError(
            "expected one of batch and batch_per_worker, found"
            f" {'both' if batch else 'neither'} ({found})"
        )
    return batch if batch is not None else _whole("batch_per_worker", per_worker) * size


def _whole(name: str, value: Any) -> int:
    """Return `value` as a Python int; other integer types, such as numpy's, are converted."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is a whole number, not {value!r}") from None


def _not_negative(name: str, value: Any) -> int:
    if (number := _whole(name, value)) < 0:
        raise ConfigError(
            f"{name}={number}: expected a number of samples from the start of the run, 0 or more"
        )
    return number
