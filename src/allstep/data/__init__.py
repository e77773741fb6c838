"""Data: where it is found, who reads what, and the batches that come of it.

`named` finds a set and reads it through `idx`, downloading with `fetch` when it must; `order` says which rank reads which sample
when; `loader` puts the two together. Only the loader needs torch, so it is fetched when it is first asked for (PEP 562): a launcher
can look for data without the second that importing torch takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allstep.data.named import NAMED, Found, ImageSet, NamedSet, Pictures, cache_folder, find, load, named_set

if TYPE_CHECKING:
    from allstep.data.loader import Batch, Loader

__all__ = [
    "NAMED",
    "Batch",
    "Found",
    "ImageSet",
    "Loader",
    "NamedSet",
    "Pictures",
    "cache_folder",
    "find",
    "load",
    "named_set",
]


def __getattr__(name: str) -> Any:
    if name not in ("Batch", "Loader"):
        raise AttributeError(f"module 'allstep.data' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module("allstep.data.loader"), name)
