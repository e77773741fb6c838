"""Datasets: find them, read their samples, divide these among the ranks, and build batches.

```
sets       datasets known by name: find, download, read
sources    read samples by number: TFRecord, tar, class folders, idx files, arrays
order      which rank reads which sample at which position of a run
image      decode bytes to pixels
augment    random operations on images, and chains of them (transforms)
packing    write any source as a few large shards
loading    the loader: batches, and the memory, threads and processes that fill them
inspect    what `allstep data info|verify|index|show` report about a dataset
random     random numbers that depend on seed, epoch and sample alone
```

The exported names are imported on first access (PEP 562). A launcher can look for data without the
second that importing torch takes, and a loader worker imports neither torch nor the downloader.
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
    """Import an exported name on first access; raise AttributeError for any other name."""
    if name not in _LATER:
        raise AttributeError(
            f"module 'allstep.data' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(_LATER[name]), name)
