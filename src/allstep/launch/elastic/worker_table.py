"""The workers of an elastic run: number, ticket, host, and their requests for a place.

The roster counts workers; a ticket is a secret that the launcher gives to one process. A request
with another ticket, or with one whose worker has ended, is refused.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from allstep.launch.roster.roster_events import Ready, Standby
from allstep.wire.keys import ask_of


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
        self._by_number: dict[int, ElasticWorker] = {}
        self._living: dict[str, ElasticWorker] = {}

    def add(self, number: int, host: str, slot: int) -> ElasticWorker:
        """Return a new worker with a ticket of its own."""
        worker = ElasticWorker(number, secrets.token_hex(16), host, slot)
        self._by_number[number] = self._living[worker.ticket] = worker
        return worker

    def __getitem__(self, number: int) -> ElasticWorker:
        return self._by_number[number]

    def living(self) -> Iterator[ElasticWorker]:
        """Yield the workers that have not ended."""
        yield from self._living.values()

    def living_on(self, host: str) -> list[ElasticWorker]:
        """Return the workers of a host that have not ended."""
        return [worker for worker in self.living() if worker.host == host]

    def end(self, number: int) -> ElasticWorker:
        """Revoke the ticket of a worker that has ended, and return it."""
        worker = self._by_number[number]
        self._living.pop(worker.ticket, None)
        return worker

    def end_host(self, host: str) -> None:
        """Revoke the tickets of all workers of a host."""
        for worker in self.living_on(host):
            self.end(worker.number)

    def shown(self, number: int) -> int:
        """Return the number to print for a worker."""
        worker = self._by_number.get(number)
        return number if worker is None else worker.shown

    def asked(self, key: str, value: bytes, at: float) -> Standby | Ready | None:
        """Return the event of a request for a place; None if its ticket is not valid."""
        ticket = key.split("/")[2]
        worker = self._living.get(ticket)
        if worker is None or key != ask_of(ticket, worker.num_answered):
            return None
        request = json.loads(value)
        worker.card = request["card"]
        if request["generation"] is None:
            return Standby(at, worker.number)
        return Ready(at, worker.number, request["generation"], request["updates"])
