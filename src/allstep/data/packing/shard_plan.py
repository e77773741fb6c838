"""The plan of a packed dataset, made before the first shard is written.

```
options + source --> Plan: the samples and the file name of each shard
```

Shards have equal numbers of samples (to within one). The number of shards of about `shard_mb`
follows from the packed size of up to 256 samples, spread over the dataset. So a plan depends only
on the source and the options, not on the number of threads, and a packing that was stopped resumes
with the same plan.

`Origin` identifies the source: its location, its number of samples, and a digest of the places of
up to 4,096 samples with sizes and times of their files; if labels are names, the digest includes
the order of the classes.
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

from allstep.data.order import permute
from allstep.data.packing.image import ImageOptions
from allstep.data.packing.record import FORMS
from allstep.data.sources.open_file import stamp_of
from allstep.data.sources.source import Source
from allstep.errors import ConfigError, DataError, did_you_mean

# Number of samples whose places go into the digest of a source.
_PROBES = 4096
MAX_SHARDS = 99_999
"""Maximum number of shards: file names have five digits."""


@dataclass(frozen=True)
class Options(ImageOptions):
    """The user's options: exactly those that change the bytes of the result."""

    name: str
    """Start of the shards' file names."""
    to: str = "tfrecord"
    """Format of the shards: "tfrecord" or "tar"."""
    shard_mb: float = 128.0
    """Approximate size of a shard in megabytes (10^6 bytes)."""
    shard_samples: int | None = None
    """Number of samples of a shard; None derives it from `shard_mb`."""
    shuffle: int | None = None
    """Seed of the order of the samples; None keeps the order of the source."""

    def __post_init__(self) -> None:
        if self.to not in FORMS:
            raise ConfigError(f"--to {self.to}: {did_you_mean(self.to, FORMS)}")
        if self.raw and self.to != "tfrecord":
            raise ConfigError(
                f"--raw is for TFRecord shards, not for --to {self.to}: tar cannot store the size"
                " of an image"
            )
        if not 0 < self.shard_mb < math.inf:
            raise ConfigError(
                f"--shard-mb {self.shard_mb:g}: expected a number of megabytes, more than 0"
            )
        if self.shard_samples is not None and self.shard_samples < 1:
            raise ConfigError(f"--shard-samples {self.shard_samples}: expected 1 or more")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(
                f"--name {self.name!r}: expected the start of a file name, without / and without a"
                " leading dot"
            )
        super().__post_init__()


@dataclass(frozen=True)
class Origin:
    """The identity of a source."""

    where: str
    """Location at which the source was opened."""
    num_samples: int
    digest: str
    """Digest of the places of samples, with sizes and times of their files."""


@dataclass(frozen=True)
class Plan:
    """The complete plan of a packed dataset."""

    options: Options
    origin: Origin
    num_shards: int
    mean_nbytes: int
    """Approximate bytes of a packed sample."""

    def file(self, shard: int) -> str:
        """Return the file name of a shard: name-00000-of-00012.tfrecord."""
        suffix = FORMS[self.options.to].suffix
        return f"{self.options.name}-{shard:05d}-of-{self.num_shards:05d}{suffix}"

    def span(self, shard: int) -> tuple[int, int]:
        """Return the shard's range of positions in the packed dataset: (start, stop)."""
        n = self.origin.num_samples
        return shard * n // self.num_shards, (shard + 1) * n // self.num_shards

    def numbers(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the source's numbers of the samples at positions `start` to `stop`."""
        positions, seed = np.arange(start, stop), self.options.shuffle
        if seed is None:
            return positions
        return permute(positions, self.origin.num_samples, "pack", seed)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values, for `from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Plan":
        """Return the plan from the values of `to_json`; KeyError or TypeError for other values."""
        return Plan(
            Options(**content["options"]),
            Origin(**content["origin"]),
            content["num_shards"],
            content["mean_nbytes"],
        )


def origin_of(source: Source, where: str) -> Origin:
    """Return the identity of `source`, which was opened at `where`."""
    if not len(source):
        raise DataError(f"{where}: has no samples to pack")
    digest = blake2b(digest_size=16)
    stamp = cache(_stamp)
    for number in spread(len(source), _PROBES):
        place = source.place(number)
        values = [place.file, place.offset, stamp(place.file)]
        digest.update(json.dumps(values, sort_keys=True).encode())
    if source.labeling.is_named:
        # Class names are packed as numbers: a folder must not mix shards of two numberings.
        digest.update(json.dumps(source.classes).encode())
    return Origin(where, len(source), digest.hexdigest())


def spread(n: int, count: int) -> list[int]:
    """Return up to `count` different numbers of 0..n-1, evenly spaced."""
    count = min(n, count)
    return [i * n // count for i in range(count)]


def num_shards(options: Options, num_samples: int, mean_nbytes: float) -> int:
    """Return the number of shards for `num_samples` samples of `mean_nbytes` bytes each."""
    if options.shard_samples is not None:
        wanted = num_samples / options.shard_samples
    else:
        wanted = num_samples * mean_nbytes / (options.shard_mb * 1e6)
    # Checked before rounding: `wanted` may be infinite.
    if wanted > MAX_SHARDS:
        raise ConfigError(
            f"{wanted:.0f} shards of that size are needed, more than {MAX_SHARDS}: increase"
            " --shard-mb or --shard-samples"
        )
    return max(1, min(math.ceil(wanted), num_samples))


def _stamp(file: str) -> Mapping[str, Any]:
    """Return size and time of `file`; an empty mapping if there is no such file.

    Arrays and synthetic samples have no file. A missing file is reported when it is read.
    """
    try:
        return stamp_of(file)
    except DataError:
        return {}
