"""A worker of an elastic run asks the launcher for its place in each world (D14).

```
worker                                launcher
ask/<ticket>/0: its card       ->     on standby
                               <-     place/<ticket>/0: generation 0, rank, cards of all ranks
... a rank is lost ...         <-     end/0: why
ask/<ticket>/1: its updates    ->     ready
                               <-     place/<ticket>/1: generation 1 ...
```

A worker keeps its ticket while its rank changes. One request gives it all that the ranks of a fixed
world exchange: the card of every member, by rank. A worker that is not in the next world is
dismissed instead.

A process whose ticket is unknown, used by another one or revoked is not admitted by the store. It
prints one line and exits: it must not write to files that now belong to another worker.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allstep import wire
from allstep.console.escape import print_notice
from allstep.errors import WorldError
from allstep.faults import WorkerFaults
from allstep.wire.keys import JOINS, SIZES, TICKET, WORKER, ask_of, place_of, progress_of
from allstep.world import World, places

_REPORT_SECONDS = 0.5
# The launcher decides how long a worker waits; if it ends, so does the connection.
_WAIT_SECONDS = 7 * 86_400.0


class Dismissed(SystemExit):
    """This worker is not in the next world, for `reason`. Uncaught, it ends the process.

    The exit code is 0 if the worker is not needed any more, 75 if the whole run stops, and 1 if the
    store does not admit it. `saves`: this worker, and no other one, saves its state before it
    exits. `num_left`: the members of its last world that are left then, itself included.
    """

    def __init__(self, reason: str, code: int, saves: bool = False, num_left: int = 1) -> None:
        super().__init__(code)
        self.reason, self.saves, self.num_left = reason, saves, num_left


def not_admitted(refused: wire.TicketRefused) -> Dismissed:
    """Print why the store does not admit this process, and return the error that ends it."""
    print_notice(f"this process is not admitted to the run and exits: {refused}")
    return Dismissed(str(refused), 1)


@dataclass(frozen=True)
class Place:
    """The place of a worker in one generation.

    cards: of all members, by rank. source: the rank whose state the others take; None in the first
    generation. new: the ranks that were not in the generation before. behind: those that were, but
    with fewer updates than the source. reason: why the world was formed. faults: which injected
    faults the worker has; only in its first place.
    """

    generation: int
    rank: int
    cards: tuple[dict[str, Any], ...]
    source: int | None
    new: frozenset[int]
    behind: frozenset[int]
    reason: str
    faults: WorkerFaults | None = None

    @property
    def world(self) -> World:
        """The world of this place."""
        hosts = [card["host"] for card in self.cards]
        return places(hosts, generation=self.generation)[self.rank]


class Membership:
    """The membership of this process in an elastic run.

    number: counts all workers of the run. joins_later: the first world had formed when this worker
    was started. sizes: numbers of ranks that a world of the run may have. updates: how many it has
    applied; None if its state is not whole. prints_changes: as rank 0 it prints a line about each
    new world, so that the launcher prints none.
    """

    def __init__(self, ticket: str) -> None:
        self.ticket = ticket
        self.number = int(os.environ.get(WORKER, "0"))
        self.joins_later = JOINS in os.environ
        self.sizes = _sizes(os.environ.get(SIZES, ""))
        self.updates: int | None = 0
        self.prints_changes = False
        self.place: Place | None = None
        # When the last place arrived, by the monotonic clock.
        self.placed_at = 0.0
        self._num_asked = 0
        self._reported_at = -_REPORT_SECONDS

    def report(self, client: wire.Client, updates: int) -> None:
        """Report that this worker has finished a step, at most twice a second."""
        self.updates = updates
        now = time.monotonic()
        if self.place is None or now - self._reported_at < _REPORT_SECONDS:
            return
        self._reported_at = now
        # Without the launcher the run ends anyway, and in another place.
        with contextlib.suppress(ConnectionError):
            value = json.dumps([self.place.generation, updates])
            client.set(progress_of(self.ticket), value.encode())

    def ask(self, client: wire.Client, card: Mapping[str, Any]) -> Place:
        """Wait until the launcher gives this worker its next place, and return it.

        Raises Dismissed if there is none, WorldError if the launcher is lost.
        """
        number, self._num_asked = self._num_asked, self._num_asked + 1
        last = None if self.place is None else self.place.generation
        mine = {**card, "prints_changes": self.prints_changes}
        request = {"card": mine, "generation": last, "updates": self.updates}
        try:
            client.set(ask_of(self.ticket, number), json.dumps(request).encode())
            reply = json.loads(client.get(place_of(self.ticket, number), _WAIT_SECONDS))
        except ConnectionError as error:
            raise _why_lost(client, error) from error
        if "dismissed" in reply:
            raise Dismissed(
                reply["dismissed"],
                reply["code"],
                reply.get("saves", False),
                reply.get("num_left", 1),
            )
        self.place, self.placed_at = _read(reply), time.monotonic()
        return self.place


def _why_lost(client: wire.Client, error: ConnectionError) -> BaseException:
    """Return the error of a worker whose connection has ended: cut off, or without a launcher."""
    with contextlib.suppress(ConnectionError):
        try:
            client.check([])
        except wire.TicketRefused as refused:
            return not_admitted(refused)
    return WorldError(f"waiting for a place in the next world: {error}")


def _read(reply: Mapping[str, Any]) -> Place:
    return Place(
        reply["generation"],
        reply["rank"],
        tuple(reply["cards"]),
        reply["source"],
        frozenset(reply["new"]),
        frozenset(reply["behind"]),
        reply["reason"],
        WorkerFaults.of_reply(reply["faults"]) if reply.get("faults") else None,
    )


def _sizes(text: str) -> range:
    """Return the sizes of a text such as `2:8`; none if it is another one."""
    least, _, most = text.partition(":")
    is_valid = least.isdecimal() and most.isdecimal()
    return range(int(least), int(most) + 1) if is_valid else range(0)


class _State:
    """Holds the membership of this process, made at the first request."""

    def __init__(self) -> None:
        self.membership: Membership | None = None

    def get(self) -> Membership | None:
        ticket = os.environ.get(TICKET)
        if ticket and (self.membership is None or self.membership.ticket != ticket):
            self.membership = Membership(ticket)
        return self.membership if ticket else None


_process = _State()


def membership() -> Membership | None:
    """Return the membership of this process; None in a fixed world."""
    return _process.get()


def current_generation() -> int | None:
    """Return the generation that this process has joined last; None in a fixed world."""
    member = membership()
    return None if member is None or member.place is None else member.place.generation
