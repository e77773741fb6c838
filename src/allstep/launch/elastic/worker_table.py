"""The workers of an elastic run: number, ticket, host, and their requests for a place.

The roster counts workers; a ticket is a secret that the launcher gives to one process. The store
admits a worker by its ticket (`wire.tickets`), and no process with another one or with that of a
worker that has ended.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from allstep.launch.roster.roster_events import Ready, Standby
from allstep.wire import Tickets
from allstep.wire.keys import ask_of, worker_of

_ASKED = ("card", "generation", "updates")


@dataclass
class ElasticWorker:
    """A worker that the launcher has started, or will start when the agent of its host is ready.

    number: the roster's. slot: its number among the slots of its host. is_ordered: the message to
    start it was sent to the agent. has_started: it has a process. rank, generation: its current or
    last place, None before the first. num_answered: how many of its requests for a place were
    answered. card: from its last request.
    """

    number: int
    ticket: str
    host: str
    slot: int
    is_ordered: bool = False
    has_started: bool = False
    rank: int | None = None
    generation: int | None = None
    num_answered: int = 0
    card: dict[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> int:
        """Return the number in front of its lines: its rank, before it has one its own number."""
        return self.number if self.rank is None else self.rank


class WorkerTable:
    """The workers of a run, by number and by ticket; ended ones are kept for their last lines."""

    def __init__(self) -> None:
        self.tickets = Tickets()
        self._by_number: dict[int, ElasticWorker] = {}
        # By the public name of the ticket, which is the number.
        self._living: dict[str, ElasticWorker] = {}

    def add(self, number: int, host: str, slot: int) -> ElasticWorker:
        """Return a new worker with a ticket of its own."""
        worker = ElasticWorker(number, self.tickets.issue(str(number)), host, slot)
        self._by_number[number] = self._living[worker_of(worker.ticket)] = worker
        return worker

    def __getitem__(self, number: int) -> ElasticWorker:
        return self._by_number[number]

    def living(self) -> Iterator[ElasticWorker]:
        """Yield the workers that have not ended."""
        yield from self._living.values()

    def is_living(self, asked: str) -> bool:
        """Return whether the worker of a request, by its key, has not ended."""
        return _worker_in(asked) in self._living

    def living_on(self, host: str) -> list[ElasticWorker]:
        """Return the workers of a host that have not ended."""
        return [worker for worker in self.living() if worker.host == host]

    def num_left(self, generation: int) -> int:
        """Return how many workers live whose last place was in this generation."""
        return sum(worker.generation == generation for worker in self.living())

    def end(self, number: int) -> ElasticWorker:
        """Revoke the ticket of a worker that has ended, and return it; its connections close."""
        worker = self._by_number[number]
        self._living.pop(worker_of(worker.ticket), None)
        self.tickets.revoke(worker.ticket)
        return worker

    def shown(self, number: int) -> int:
        """Return the number to print for a worker."""
        worker = self._by_number.get(number)
        return number if worker is None else worker.shown

    def asked(self, key: str, value: bytes, at: float) -> Standby | Ready | None:
        """Return the event of a request for a place.

        None if the worker has ended meanwhile, has asked before, or asks for nothing sensible.
        """
        name = _worker_in(key)
        worker = self._living.get(name)
        if worker is None or key != ask_of(name, worker.num_answered):
            return None
        try:
            request = json.loads(value)
            card, generation, updates = (request[each] for each in _ASKED)
        # RecursionError: thousands of opening brackets.
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not isinstance(card, dict) or not _is_number(generation) or not _is_number(updates):
            return None
        worker.card = card
        if generation is None:
            return Standby(at, worker.number)
        return Ready(at, worker.number, generation, updates)

    @staticmethod
    def progress(value: bytes) -> tuple[int, int] | None:
        """Return the generation and the updates that a worker has reported; None for nonsense."""
        try:
            generation, updates = json.loads(value)
        except (ValueError, TypeError, RecursionError):
            return None
        is_valid = type(generation) is int and type(updates) is int
        return (generation, updates) if is_valid else None


def _worker_in(asked: str) -> str:
    """Return the public name of the worker in the key of a request."""
    return asked.split("/")[2]


def _is_number(value: object) -> bool:
    """Return whether a value is a number of a generation or of updates, or absent."""
    return value is None or type(value) is int
