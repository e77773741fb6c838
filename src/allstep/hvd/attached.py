"""Objects of a script that outlive an engine, such as its optimizers.

`hvd.shutdown(); hvd.init()` ends one engine, with all its groups and process sets, and starts
another. An object that uses groups is registered here: `_detach_from_engine` is called before the
groups close, `_attach_to_engine` when the new engine runs. In between, the object holds nothing of
the old engine, and no step is in progress.

`_attach_to_engine` must not communicate with other ranks, since an object may have been collected
on one rank and not yet on another. Objects that the ranks create together (a group, shared memory)
are created at the first use, when all ranks communicate anyway.
"""

import weakref
from itertools import count
from typing import Protocol


class Attached(Protocol):
    """The interface of an object that outlives an engine."""

    def _attach_to_engine(self) -> None:
        """Prepare to use the running engine. Also called when the object is made."""

    def _detach_from_engine(self) -> None:
        """Drop the step in progress and all resources of the engine, which closes next."""


# By number, in the order in which they were made.
_objects: weakref.WeakValueDictionary[int, Attached] = weakref.WeakValueDictionary()
_numbers = count()


def keep_attached(thing: Attached) -> None:
    """Attach an object to the running engine and to all later ones, as long as it exists."""
    thing._attach_to_engine()
    _objects[next(_numbers)] = thing


def attach_all() -> None:
    """Attach all registered objects, in the order in which they were made; called by `init`."""
    for thing in list(_objects.values()):
        thing._attach_to_engine()


def detach_all() -> None:
    """Detach all registered objects, even if one of them fails; called by `shutdown`."""
    failed: list[Exception] = []
    for thing in list(_objects.values()):
        try:
            thing._detach_from_engine()
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]
