"""The keys by which the ranks match optimizers and gradient lists: numbers in the order of first
use, from 0 in each world.

The members of a process set reduce the gradients of one step after the other, in one group, so all
of them use their objects in the same order. The order in which objects were *made* would not do: a
worker that joins an elastic run has made its objects once, while the others may have made theirs
again in each call of the training function, and may keep old ones that they do not use.

A rank that has joined (`hvd.join`) participates in steps of objects that it may not have used yet.
For it, unused objects follow in the order in which they were made.
"""

import weakref
from functools import partial
from typing import Protocol

from allstep.hvd.place import running


class Participant(Protocol):
    """An object that reduces gradients, step by step."""

    def _participate(self, number: int) -> None:
        """Contribute nothing to step `number` of the other ranks."""


class _Members:
    """The objects of one process set in this world."""

    def __init__(self, process_set_id: int) -> None:
        self._prefix = f"gradients/{process_set_id}"
        self._used: list[weakref.ref[Participant]] = []
        self._unused: list[weakref.ref[Participant]] = []

    def add(self, thing: Participant) -> None:
        number = len(self._used) + len(self._unused)
        self._unused.append(weakref.ref(thing))
        running().on_notice(self._key(number), partial(self._participate, number))

    def key_of(self, thing: Participant) -> str:
        if all(each() is not thing for each in self._used):
            self._unused = [each for each in self._unused if each() is not thing]
            self._used.append(weakref.ref(thing))
        number = next(place for place, each in enumerate(self._used) if each() is thing)
        return self._key(number)

    def _participate(self, number: int, step: int) -> None:
        while len(self._used) <= number:
            self._used.append(self._unused.pop(0))
        thing = self._used[number]()
        assert thing is not None, f"{self._key(number)} is gone, but other ranks use it"
        thing._participate(step)

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"


_by_set: dict[int, _Members] = {}


def add(thing: Participant, process_set_id: int | None) -> None:
    """Add an object that will reduce gradients in this world.

    `process_set_id`: None if its set is not registered yet; then its first use adds it.
    """
    if process_set_id is not None:
        _members(process_set_id).add(thing)


def key_of(thing: Participant, process_set_id: int) -> str:
    """Return the key of an object, the same on all ranks of its set; the first call is a use."""
    return _members(process_set_id).key_of(thing)


def forget() -> None:
    """Start at zero, in the next world; called by `shutdown`."""
    _by_set.clear()


def _members(process_set_id: int) -> _Members:
    return _by_set.setdefault(process_set_id, _Members(process_set_id))
