"""Data: where it is found, who reads what, and the batches that come of it.

`opening` makes a source of whatever lies at a path (TFRecords, tars, class folders, idx files, arrays).
`named` finds a set and reads it through `idx`, downloading with `fetch` when it must; `order` says which rank reads which sample
when; `transform` and `augment` make pictures of what is stored; `loader` puts all together. What needs torch or OpenCV is fetched when
it is first asked for (PEP 562): a launcher can look for data without the second that importing torch takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allstep.data.named import NAMED, Found, ImageSet, NamedSet, Pictures, cache_folder, find, load, named_set

if TYPE_CHECKING:
    from allstep.data.arrays import ArraySource, CifarSource, IdxSource
    from allstep.data.dataset import as_dataset
    from allstep.data.folder import FolderSource
    from allstep.data.loader import Batch, Loader
    from allstep.data.mix import Cutmix, Mixup
    from allstep.data.normalise import Normalise
    from allstep.data.opening import open_source
    from allstep.data.source import BadSample, Sample, Source
    from allstep.data.synthetic import SyntheticSource
    from allstep.data.tar import TarSource
    from allstep.data.tfrecord import TFRecordSource
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
    "ArraySource": "arrays",
    "BadSample": "source",
    "Batch": "loader",
    "CifarSource": "arrays",
    "Cutmix": "mix",
    "FolderSource": "folder",
    "IdxSource": "arrays",
    "Loader": "loader",
    "Mixup": "mix",
    "Normalise": "normalise",
    "Sample": "source",
    "Source": "source",
    "SyntheticSource": "synthetic",
    "TFRecordSource": "tfrecord",
    "TarSource": "tar",
    "Transform": "transform",
    "as_dataset": "dataset",
    "open_source": "opening",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'allstep.data' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"allstep.data.{_LATER[name]}"), name)
