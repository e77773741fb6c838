"""A small launcher of elastic worlds, for tests of what happens in the workers.

    def change(launcher: Generations) -> None:      # runs in the test process
        launcher.form(["a", "b", "c"])              # generation 0, once all three wait for a place
        launcher.kill("b")
        launcher.end("lost rank 1")
        launcher.form(["a", "c"])                   # generation 1, once both wait again

    results = run_generations(ranks, ["a", "b", "c"], worker, change)

It decides nothing: the test does. `run_generations` returns the outcomes of the workers by ticket.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from allstep import wire
from allstep.comm.group.init import session
from allstep.process.liveness import birth
from allstep.wire.keys import ask_of, end_of, place_of
from support.ranks import Outcome, Ranks

_SECONDS = 40.0


def note(text: str) -> None:
    """Write to the store that this worker has come so far; called in a worker."""
    default = session().default
    assert default is not None
    default.joined.rendezvous.store.set(f"{text}/{os.environ['ALLSTEP_TICKET']}", "")


class Generations:
    """The launcher's side: answers requests for places in the order of the test."""

    def __init__(self, store: wire.Server) -> None:
        self.store = store
        self.generation = -1
        self.asks: dict[str, dict[str, Any]] = {}
        self._answered: dict[str, int] = {}
        self._members: list[str] = []

    def wait_for(self, ticket: str) -> dict[str, Any]:
        """Return the next request of a worker, once it has come."""
        key = ask_of(ticket, self._answered.get(ticket, 0))
        self._until_set(key)
        self.asks[ticket] = json.loads(self.store.peek(key) or b"")
        return self.asks[ticket]

    def wait_for_notes(self, text: str, tickets: Sequence[str]) -> None:
        """Wait until these workers have written a note to the store."""
        for ticket in tickets:
            self._until_set(f"{text}/{ticket}")

    def wait_for_exit(self, ticket: str) -> None:
        """Wait until a worker has ended."""
        pid = self.asks[ticket]["card"]["pid"]
        self._until(lambda: birth(pid) is None, f"exit of {ticket}")

    def _until_set(self, key: str) -> None:
        self._until(lambda: self.store.peek(key) is not None, key)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + _SECONDS
        while not condition():
            assert time.monotonic() < end, f"no {what}; keys: {self.store.keys('elastic/')}"
            time.sleep(0.001)

    def form(self, tickets: Sequence[str], source: int | None = None) -> None:
        """Form the next generation of these workers, by rank, once all wait for a place."""
        cards = [self.wait_for(ticket)["card"] for ticket in tickets]
        self.generation += 1
        # All members have left the generation before.
        self.store.delete_prefix(f"allstep/{self.generation}/")
        self.store.delete_prefix("allstep/failure/")
        new = [rank for rank, ticket in enumerate(tickets) if ticket not in self._members]
        self._members = list(tickets)
        for rank, ticket in enumerate(tickets):
            self._answer(
                ticket,
                num_keys=len(self.store.keys("")),
                generation=self.generation,
                rank=rank,
                cards=cards,
                source=source,
                new=new,
                behind=[],
                reason="a test",
            )

    def dismiss(self, ticket: str, why: str) -> None:
        """Give a worker no further place."""
        self.wait_for(ticket)
        self._answer(ticket, dismissed=why, code=0)

    def end(self, reason: str) -> None:
        """End the current generation."""
        self.store.delete_prefix(end_of(self.generation - 1))
        self.store.set(end_of(self.generation), reason.encode())

    def kill(self, ticket: str) -> None:
        """Kill a worker with SIGKILL."""
        os.kill(self.asks[ticket]["card"]["pid"], signal.SIGKILL)

    def _answer(self, ticket: str, **reply: Any) -> None:
        number = self._answered.get(ticket, 0)
        self._answered[ticket] = number + 1
        self.store.delete_prefix(ask_of(ticket, number))
        self.store.delete_prefix(place_of(ticket, number - 1))
        self.store.set(place_of(ticket, number), json.dumps(reply).encode())


def run_generations(
    ranks: Ranks,
    tickets: Sequence[str],
    function: Callable[..., Any],
    change: Callable[[Generations], None],
    *args: Any,
    hosts: Sequence[str] | None = None,
    timeout: float = 90,
    env: dict[str, str] | None = None,
) -> dict[str, Outcome]:
    """Run `function` in a worker per ticket, and `change` here; return the outcomes by ticket."""
    outcomes = ranks.outcomes(
        len(tickets),
        function,
        *args,
        hosts=hosts,
        timeout=timeout,
        env=env,
        envs=[{"ALLSTEP_TICKET": ticket} for ticket in tickets],
        alongside=lambda store: change(Generations(store)),
    )
    return dict(zip(tickets, outcomes, strict=True))
