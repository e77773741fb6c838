"""What the labels of a shard are stored as, kept in the shard's index.

```
extra["labels"] = {"in": "label", "whole": false, "stored": {"numbers": 32, "texts": 0, ...}}
                    feature or      whether all samples were     what was counted (`labels.Stored`)
                    extension       read, or only a few of them
```

The walk that builds an index looks at the labels as well, while all bytes are at hand. An index
from before labels were kept, or of another feature, is completed when the shard is opened.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from allstep.data.sources.files import check_unchanged, lockable, open_file
from allstep.data.sources.index import Index, index_places, read_index, write_index
from allstep.data.sources.labels import StoredLabels
from allstep.data.sources.unpack import all_content
from allstep.files.lock import in_turn


def noted(place: str, stored: StoredLabels, whole: bool) -> dict[str, Any]:
    """The entry of an index's `extra`."""
    return {"labels": {"in": place, "whole": whole, "stored": stored.to_json()}}


def kept(index: Index, place: str, whole: bool) -> StoredLabels | None:
    """What an index says of the labels in `place`: of the `whole` shard, or of a few.

    None: nothing.
    """
    about = index.extra.get("labels", {})
    if about.get("in") != place or (whole and not about["whole"]):
        return None
    return StoredLabels.from_json(about["stored"])


def completed(
    where: str,
    kind: str,
    index: Index,
    place: str,
    whole: bool,
    look: Callable[[memoryview], tuple[StoredLabels, bool]],
) -> Index:
    """An index of `where` that says what labels in `place` are stored as.

    It is `index` itself, one in the cache, or a new one.
    `look` gets all bytes of the shard, and returns what it counted and whether it read all samples.
    """
    if found := _find(where, kind, index, place, whole):
        return found
    with in_turn(lockable(where)):
        # Another process may have completed it in the meantime.
        if found := _find(where, kind, index, place, whole):
            return found
        file = open_file(where)
        check_unchanged([where], [index.stamp], [file.stamp])
        with all_content(file, index.extra["packed"]) as view:
            extra = noted(place, *look(view))
        made = replace(index, extra={**index.extra, **extra})
        any(write_index(file, kind, made) for file in index_places(where))
    return made


def _find(where: str, kind: str, index: Index, place: str, whole: bool) -> Index | None:
    """The first one that says it: a folder that cannot be written keeps an old one, the cache has
    the new one."""
    if kept(index, place, whole):
        return index
    others = (read_index(file, kind, index.stamp) for file in index_places(where))
    return next((other for other in others if other and kept(other, place, whole)), None)
