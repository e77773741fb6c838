"""Data: where it is found, who reads what, and the batches that come of it.

```
sets        sets known by name: found, downloaded, read         sources    TFRecord, tar, folders, idx, arrays: samples by number
order       which rank reads which sample when                  packing    any source into a few large shards
image       bytes to pixels                                     augment    what is done to an image; transform: a chain of it
loading     memory, threads and processes behind `loader`       loader     batches, which is what all of it is for
```

The modules of `inspect` look at a dataset for `allstep data`. All names here are imported when they
are first asked for (PEP 562): a launcher can look for data without the second that importing torch
takes, and a worker process of the loader needs neither torch nor what downloads datasets.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allstep.data.augment.mix import Cutmix, Mixup
    from allstep.data.augment.normalize import Normalize
    from allstep.data.augment.transform import Transform
    from allstep.data.loading.dataset import as_dataset
    from allstep.data.loading.loader import Batch, Loader
    from allstep.data.opening import open_source
    from allstep.data.sets.load import (
        NAMED,
        Found,
        Images,
        ImageSet,
        NamedSet,
        cache_folder,
        find,
        load,
        named_set,
    )
    from allstep.data.sources.arrays import ArraySource, CifarSource, IdxSource
    from allstep.data.sources.folder import FolderSource
    from allstep.data.sources.source import BadSample, Sample, Source
    from allstep.data.sources.synthetic import SyntheticSource
    from allstep.data.sources.tar.source import TarSource
    from allstep.data.sources.tfrecord.source import TFRecordSource

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
    "Normalize",
    "Images",
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
    "ArraySource": "allstep.data.sources.arrays",
    "BadSample": "allstep.data.sources.source",
    "Batch": "allstep.data.loading.loader",
    "CifarSource": "allstep.data.sources.arrays",
    "Cutmix": "allstep.data.augment.mix",
    "FolderSource": "allstep.data.sources.folder",
    "Found": "allstep.data.sets.load",
    "IdxSource": "allstep.data.sources.arrays",
    "ImageSet": "allstep.data.sets.load",
    "Loader": "allstep.data.loading.loader",
    "Mixup": "allstep.data.augment.mix",
    "NAMED": "allstep.data.sets.load",
    "NamedSet": "allstep.data.sets.load",
    "Normalize": "allstep.data.augment.normalize",
    "Images": "allstep.data.sets.load",
    "Sample": "allstep.data.sources.source",
    "Source": "allstep.data.sources.source",
    "SyntheticSource": "allstep.data.sources.synthetic",
    "TFRecordSource": "allstep.data.sources.tfrecord.source",
    "TarSource": "allstep.data.sources.tar.source",
    "Transform": "allstep.data.augment.transform",
    "as_dataset": "allstep.data.loading.dataset",
    "cache_folder": "allstep.data.sets.load",
    "find": "allstep.data.sets.load",
    "load": "allstep.data.sets.load",
    "named_set": "allstep.data.sets.load",
    "open_source": "allstep.data.opening",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(
            f"module 'allstep.data' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(_LATER[name]), name)
