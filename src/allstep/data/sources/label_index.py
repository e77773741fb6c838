"""How the labels of a shard are stored, as an entry of the shard's index.

```
extra["labels"] = {"in": "label", "whole": false, "stored": {"numbers": 32, "texts": 0, ...}}
                    feature or      whether all samples were     the counts
                    extension       read, or only a few          (`labels.StoredLabels`)
```

The scan that builds an index reads the labels too, while all bytes are available. An index of the
format without labels, or for another feature, is completed when the shard is opened.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from allstep.data.sources.files import check_unchanged, lockable, open_file
from allstep.data.sources.index import Index, index_places, read_index, write_index
from allstep.data.sources.labels import StoredLabels
from allstep.data.sources.unpack import all_content
from allstep.files.lock import in_turn


def labels_entry(place: str, stored: StoredLabels, whole: bool) -> dict[str, Any]:
    """Return the entry on labels for the `extra` of an index.

    `place` is the feature or extension of the labels; `whole`: all samples of the shard were read.
    """
    return {"labels": {"in": place, "whole": whole, "stored": stored.to_json()}}


def indexed_labels(index: Index, place: str, whole: bool) -> StoredLabels | None:
    """Return the counts of an index for the labels in `place`; None if it has none.

    With `whole`, only counts over all samples of the shard will do.
    """
    about = index.extra.get("labels", {})
    if about.get("in") != place or (whole and not about["whole"]):
        return None
    return StoredLabels.from_json(about["stored"])


def index_with_labels(
    where: str,
    kind: str,
    index: Index,
    place: str,
    whole: bool,
    look: Callable[[memoryview], tuple[StoredLabels, bool]],
) -> Index:
    """Return an index of `where` that has the counts for the labels in `place`.

    It is `index` itself, one in the cache, or a new one. `look` gets all bytes of the shard, and
    returns the counts and whether it read all samples.
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
            extra = labels_entry(place, *look(view))
        made = replace(index, extra={**index.extra, **extra})
        any(write_index(file, kind, made) for file in index_places(where))
    return made


def _find(where: str, kind: str, index: Index, place: str, whole: bool) -> Index | None:
    """Return the first index that has the counts: `index` itself, or a stored one.

    A folder that is not writable keeps an old index, while the cache has the new one.
    """
    if indexed_labels(index, place, whole):
        return index
    others = (read_index(file, kind, index.stamp) for file in index_places(where))
    return next((each for each in others if each and indexed_labels(each, place, whole)), None)
