"""Objects of a script that outlive an engine, such as its optimizers.

`hvd.shutdown(); hvd.init()` ends one engine, with all its groups and process sets, and starts
another. An object that uses groups is kept here: `_detach_from_engine` is called before the groups
close, `_attach_to_engine` when the new engine runs. Between the two it holds nothing of the old
engine, and no step is under way.

`_attach_to_engine` must not talk to other ranks, since an object may have been collected on one
rank and not yet on another. What the ranks make together (a group, shared memory) is made at the
first use, where all ranks come together anyway.
"""

import weakref
from typing import Protocol


class Attached(Protocol):
    """What is asked of such an object."""

    def _attach_to_engine(self) -> None:
        """An engine runs. Also called when the object is made."""

    def _detach_from_engine(self) -> None:
        """The engine is about to close: drop what is under way, and all that belongs to it."""


_objects: weakref.WeakSet[Attached] = weakref.WeakSet()


def keep_attached(thing: Attached) -> None:
    """Attach it to the engine that runs, and to those that follow, as long as it exists."""
    thing._attach_to_engine()
    _objects.add(thing)


def attach_all() -> None:
    """Called by `init`."""
    for thing in list(_objects):
        thing._attach_to_engine()


def detach_all() -> None:
    """Called by `shutdown`. All are detached, also when one of them fails."""
    failed: list[Exception] = []
    for thing in list(_objects):
        try:
            thing._detach_from_engine()
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]
