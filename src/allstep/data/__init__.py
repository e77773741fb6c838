"""Data: where it is found, who reads what, and the batches that come of it.

```
sets        sets known by name: found, downloaded, read         sources    TFRecord, tar, folders, idx, arrays: samples by number
order       which rank reads which sample when                  packing    any source into a few large shards
pictures    bytes to pixels, random numbers, batches            augment    what is done to a picture; transform: a chain of it
loading     memory, threads and processes behind `loader`       loader     batches, which is what all of it is for
```

`info`, `verify`, `indexing` and `sheet` look at a set for `allstep data`. All names here are imported when they are first asked for
(PEP 562): a launcher can look for data without the second that importing torch takes, and a worker process of the loader needs neither
torch nor what downloads datasets.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allstep.data.loader import Batch, Loader
    from allstep.data.loading.dataset import as_dataset
    from allstep.data.pictures.mix import Cutmix, Mixup
    from allstep.data.pictures.normalise import Normalise
    from allstep.data.sets.named import (
        NAMED,
        Found,
        ImageSet,
        NamedSet,
        Pictures,
        cache_folder,
        find,
        load,
        named_set,
    )
    from allstep.data.sources.arrays import ArraySource, CifarSource, IdxSource
    from allstep.data.sources.folder import FolderSource
    from allstep.data.sources.opening import open_source
    from allstep.data.sources.source import BadSample, Sample, Source
    from allstep.data.sources.synthetic import SyntheticSource
    from allstep.data.sources.tar import TarSource
    from allstep.data.sources.tfrecord import TFRecordSource
    from allstep.data.transform import Transform

__all__ = [
    "NAMED",
    "ArraySource",
    "BadSample",
    "Batch",
    "CifarSource",
    "Cutmix",
    "FolderSource",
    "Found",
    "IdxSource",
    "ImageSet",
    "Loader",
    "Mixup",
    "NamedSet",
    "Normalise",
    "Pictures",
    "Sample",
    "Source",
    "SyntheticSource",
    "TFRecordSource",
    "TarSource",
    "Transform",
    "as_dataset",
    "cache_folder",
    "find",
    "load",
    "named_set",
    "open_source",
]


_LATER = {
    "ArraySource": "sources.arrays",
    "BadSample": "sources.source",
    "Batch": "loader",
    "CifarSource": "sources.arrays",
    "Cutmix": "pictures.mix",
    "FolderSource": "sources.folder",
    "Found": "sets.named",
    "IdxSource": "sources.arrays",
    "ImageSet": "sets.named",
    "Loader": "loader",
    "Mixup": "pictures.mix",
    "NAMED": "sets.named",
    "NamedSet": "sets.named",
    "Normalise": "pictures.normalise",
    "Pictures": "sets.named",
    "Sample": "sources.source",
    "Source": "sources.source",
    "SyntheticSource": "sources.synthetic",
    "TFRecordSource": "sources.tfrecord",
    "TarSource": "sources.tar",
    "Transform": "transform",
    "as_dataset": "loading.dataset",
    "cache_folder": "sets.named",
    "find": "sets.named",
    "load": "sets.named",
    "named_set": "sets.named",
    "open_source": "sources.opening",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'allstep.data' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"allstep.data.{_LATER[name]}"), name)
