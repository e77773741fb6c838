"""What a packed set will be, decided before the first shard is written.

```
options + source --> Plan: which samples go into which shard, and what each shard is called
```

Shards have equal numbers of samples (to within one). How many of them are needed for shards of
about `shard_mb` follows from the size that a few hundred samples, spread over the set, take when
they are packed. So a plan depends on the source and the options alone, never on the number of
threads, and a packing that was stopped goes on with the same plan.

`Origin` is what the source is recognised by: its place, number of samples, and a digest of where up
to 4,096 samples lie in it with the sizes and times of their files; of a source whose labels are
names, also the order of its classes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.image.limit import MAX_PIXELS
from allstep.data.order import permute
from allstep.data.packing.image import Recoding
from allstep.data.packing.record import FORMS
from allstep.data.sources.files import stamp_of
from allstep.data.sources.source import Source
from allstep.errors import ConfigError, DataError, did_you_mean

_PROBES = 4096
MAX_SHARDS = 99_999  # what five digits hold


@dataclass(frozen=True)
class Options:
    """What the user asked for; everything that changes a byte of the result, and nothing else."""

    name: str
    to: str = "tfrecord"
    shard_mb: float = 128.0
    shard_samples: int | None = None
    shuffle: int | None = None
    """Seed of the order; None keeps that of the source."""
    max_side: int | None = None
    quality: int = 90
    raw: bool = False
    format: str = "keep"
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        if self.to not in FORMS:
            raise ConfigError(f"--to {self.to}: {did_you_mean(self.to, FORMS)}")
        if self.raw and self.to != "tfrecord":
            raise ConfigError(
                f"--raw is for TFRecord shards, not for --to {self.to}: tar has no place for a"
                " image's size"
            )
        if not 0 < self.shard_mb < math.inf:
            raise ConfigError(
                f"--shard-mb {self.shard_mb:g}: expected a number of megabytes, more than 0"
            )
        if self.shard_samples is not None and self.shard_samples < 1:
            raise ConfigError(f"--shard-samples {self.shard_samples}: expected 1 or more")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"--name {self.name!r}: expected the beginning of a file's name")
        self.recoding()

    def recoding(self) -> Recoding:
        """What happens to the images."""
        return Recoding(self.max_side, self.quality, self.raw, self.format, self.max_pixels)


@dataclass(frozen=True)
class Origin:
    """What a source is recognised by."""

    where: str
    num_samples: int
    digest: str


@dataclass(frozen=True)
class Plan:
    """The whole packed set, before it is there."""

    options: Options
    origin: Origin
    num_shards: int
    mean_nbytes: int
    """What a sample takes, about."""

    def file(self, shard: int) -> str:
        """Name of a shard's file: name-00000-of-00012.tfrecord."""
        return f"{self.options.name}-{shard:05d}-of-{self.num_shards:05d}{FORMS[self.options.to].suffix}"

    def span(self, shard: int) -> tuple[int, int]:
        """Positions of the shard's samples in the packed set: first, and one after the last."""
        n = self.origin.num_samples
        return shard * n // self.num_shards, (shard + 1) * n // self.num_shards

    def numbers(self, start: int, stop: int) -> NDArray[np.int64]:
        """Numbers, in the source, of the samples at positions `start` to `stop` of the packed set."""
        positions = np.arange(start, stop)
        seed = self.options.shuffle
        return (
            positions if seed is None else permute(positions, self.origin.num_samples, "pack", seed)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` takes."""
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Plan":
        """The plan that `to_json` was called on. KeyError or TypeError when it is none of ours."""
        return Plan(
            Options(**content["options"]),
            Origin(**content["origin"]),
            content["num_shards"],
            content["mean_nbytes"],
        )


def origin_of(source: Source, where: str) -> Origin:
    """What `source`, opened at `where`, is recognised by."""
    if not len(source):
        raise DataError(f"{where}: has no samples to pack")
    digest = blake2b(digest_size=16)
    stamp = cache(_stamp)
    for number in spread(len(source), _PROBES):
        place = source.place(number)
        digest.update(
            json.dumps([place.file, place.offset, stamp(place.file)], sort_keys=True).encode()
        )
    if source.labeling.is_named:
        # Names are packed as numbers: a folder must not hold shards of two numberings.
        digest.update(json.dumps(source.classes).encode())
    return Origin(where, len(source), digest.hexdigest())


def spread(n: int, count: int) -> list[int]:
    """Up to `count` different numbers of 0..n-1, evenly spread."""
    count = min(n, count)
    return [i * n // count for i in range(count)]


def num_shards(options: Options, num_samples: int, mean_nbytes: float) -> int:
    """How many shards hold `num_samples` that take `mean_nbytes` each."""
    if options.shard_samples is not None:
        wanted = num_samples / options.shard_samples
    else:
        wanted = num_samples * mean_nbytes / (options.shard_mb * 1e6)
    if wanted > MAX_SHARDS:  # which may be so many that no whole number can be made of it
        raise ConfigError(
            f"{wanted:.0f} shards of that size are needed, more than {MAX_SHARDS}: let a shard hold"
            " more"
        )
    return max(1, min(math.ceil(wanted), num_samples))


def _stamp(file: str) -> Mapping[str, Any]:
    """Arrays and synthetic samples lie in no file, and a file that is gone is no reason to refuse:
    reading will say so."""
    try:
        return stamp_of(file)
    except DataError:
        return {}
