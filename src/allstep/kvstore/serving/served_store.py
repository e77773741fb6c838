"""One store on one server: its parts and its parties. Its methods are the requests of links.

No socket and no process here, so tests call these methods from threads.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from allstep.console.escape import print_notice
from allstep.errors import CommError
from allstep.kvstore.links.announced import Announced
from allstep.kvstore.links.pair import as_bytes
from allstep.kvstore.memory.key_memory import KeyShape, short
from allstep.kvstore.rules.codecs import Codecs, read_codecs
from allstep.kvstore.rules.gradient_age import max_age
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.offers import Offer
from allstep.kvstore.rules.row_span import RowSpan
from allstep.kvstore.serving.party_calls import LEFT, LOST, PartyCalls
from allstep.kvstore.serving.served_part import ServedPart
from allstep.kvstore.serving.takeovers import Takeovers
from allstep.kvstore.updates.imported_class import imported_optimizer
from allstep.kvstore.updates.key_optimizer import KeyOptimizer, StatePlan, may_keep_state
from allstep.kvstore.updates.optimizer_class import OptimizerClass
from allstep.kvstore.updates.row_updates import Rows
from allstep.kvstore.updates.states_file import whole_state


class ServedStore:
    """A store as one server sees it. announced: what its workers have announced."""

    def __init__(self, announced: Announced) -> None:
        self.announced = announced
        self.is_sync = announced.mode == "sync"
        self.parts: dict[int, ServedPart] = {}
        self.calls = PartyCalls(announced.num_parties, self._wake_parts)
        self.takeovers = Takeovers(self.calls)
        self.codecs = Codecs()
        self._chosen: OptimizerClass | None = None
        self._num_hosts = len(set(announced.hosts))
        is_stale = announced.mode == "stale"
        self._bound = max_age(announced.rounds, announced.num_parties) if is_stale else None

    # Parts: one party calls these while all are in `init` or `set_optimizer`

    def add(self, number: int, text: str) -> None:
        """Make a part: JSON with key, dtype and shape, its first element, the width of rows."""
        self.parts[number] = self._made(text)

    def _made(self, text: str) -> ServedPart:
        key, dtype, shape, *place = json.loads(text)
        numel = torch.Size(shape).numel()
        form = KeyShape(key, tuple(shape), getattr(torch, dtype), parts=((0, numel),))
        start, width = place or (0, form.width)
        span = RowSpan(start, start + numel, max(1, width))
        part = ServedPart(form, self._num_hosts, self._bound, span)
        self._encode_pulls(part)
        if self._chosen is not None:
            part.attach(self._chosen)
        return part

    def set_value(self, number: int, value: Tensor) -> None:
        """Set the first value of a part."""
        part = self.part(number)
        part.set_value(value, self.announced.num_parties)
        if part.optimizer is not None:
            part.optimizer.copy_to_master()

    def set_codecs(self, text: str) -> None:
        """Receive and send encoded values from now on. text: of `Codecs`."""
        self.codecs = read_codecs(text)
        for part in list(self.parts.values()):
            self._encode_pulls(part)

    def _encode_pulls(self, part: ServedPart) -> None:
        part.encode_pulls(self.codecs.of(part.form.dtype).pull, is_common=self.is_sync)

    def part(self, number: int) -> ServedPart:
        """Return a part; CommError if this server does not have it."""
        if number not in self.parts:
            self.takeovers.wait_for(number)
        if (found := self.parts.get(number)) is None:
            raise CommError(f"kvstore: part {number} is not on this server")
        return found

    # Parts of a lost server

    def offer(self, party: int, text: str) -> str:
        """Take a party's offer of copies; return as JSON which parts it must send, and has not.

        text: JSON with the name of the lost server, and the offer of each part.
        """
        given = json.loads(text)

        def report(numbers: Sequence[int], ranks: set[int], most: int) -> None:
            copies = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
            slices = f"{len(numbers)} slice{'s' if len(numbers) > 1 else ''}"
            print_notice(
                f"kvstore: lost {given['lost']}; server {self.announced.server} continues"
                f" {slices} of it from the copy of {copies}: {most} updates are lost"
                if ranks
                else f"kvstore: lost {given['lost']}, and no worker has a copy of its values"
            )

        offers = {int(number): Offer(*each) for number, each in given["parts"].items()}
        return json.dumps(self.takeovers.offer(party, offers, report))

    def take(self, number: int, text: str, data: Tensor) -> None:
        """Continue a part of a lost server from a party's copy; its optimizer starts from zero.

        text: as of `add`. data: the value, as bytes.
        """
        part = self._made(text)
        value = torch.empty(part.form.numel, dtype=part.form.dtype)
        as_bytes(value).copy_(data)
        part.set_value(value, self.announced.num_parties)
        if part.optimizer is not None:
            part.optimizer.copy_to_master()
        self.parts[number] = part
        self.takeovers.arrived(number)

    def drop(self) -> None:
        """Forget all parts, which workers place again."""
        self.parts.clear()

    def set_optimizer(self, text: str) -> None:
        """Update with the optimizer that a worker has sent; keep the state if only settings change.

        Raises UserError if the class cannot be imported here.
        """
        chosen = imported_optimizer(text)
        found = {number: part.optimizer for number, part in self.parts.items()}
        present: dict[Key, KeyOptimizer] = {
            number: each for number, each in found.items() if each is not None
        }
        plans: dict[Key, StatePlan] = {
            number: part.plan(chosen) for number, part in self.parts.items()
        }
        is_whole = len(present) == len(found)
        if is_whole and may_keep_state(present, self._chosen, chosen, plans):
            for optimizer in present.values():
                optimizer.use_settings(chosen)
        else:
            for part in self.parts.values():
                part.attach(chosen)
        self._chosen = chosen

    # Pushes and pulls

    def wait_for_turn(self, party: int, number: int) -> None:
        """Wait until the last contribution of a party's host to a part has become an update."""
        part = self.part(number)
        part.wait_for_turn(self.announced.hosts[party], self._check_all(part))

    def contribute(self, party: int, number: int, rows: Rows | None = None) -> None:
        """Count the contribution of a party's host to the round of a part.

        rows: what it is; None: what is in its room.
        """
        self.part(number).contribute(self.announced.hosts[party], rows)

    def room(self, party: int, number: int) -> Tensor:
        """Return the memory for that contribution."""
        return self.part(number).room(self.announced.hosts[party])

    def push(self, party: int, number: int, gradient: Tensor | Rows) -> None:
        """Apply a gradient."""
        self.part(number).push(party, gradient, self.calls.idle)

    def wait_for_round(self, number: int, round_number: int) -> None:
        """Wait for a round of a part; PeerLost if a party is gone, which ends the rounds."""
        part = self.part(number)
        part.wait_for_round(round_number, self._check_all(part))

    def _check_all(self, part: ServedPart) -> Callable[[], None]:
        """Return what raises PeerLost if a party is gone."""

        def check() -> None:
            if self.calls.gone:
                raise self.calls.lost(f"pull of key {part.form.key!r}")

        return check

    # Calls of all parties

    def collect(self, party: int, what: str, text: str, *, needs_all: bool, number: int = 0) -> str:
        """Return, as JSON, the texts of all parties."""
        return json.dumps(self.calls.enter(party, what, text, needs_all=needs_all, number=number))

    def rest(self, party: int) -> None:
        """Let no push wait for this party: it begins a barrier."""
        self.calls.rest(party, is_resting=True)

    def wake(self, party: int) -> str:
        """End that, after all parties have begun; return as JSON the parts that it must pull again.

        Their gradients of this party have become too old.
        """
        living = self.calls.living
        late = [n for n, part in list(self.parts.items()) if not part.keep_read(party, living)]
        self.calls.rest(party, is_resting=False)
        return json.dumps(late)

    def leave(self, party: int, *, in_order: bool) -> None:
        """Count a party as gone."""
        self.calls.leave(party, LEFT if in_order else LOST)
        for part in list(self.parts.values()):
            part.leave(party)

    def _wake_parts(self) -> None:
        """Let waits of parts look again at which parties are idle or gone."""
        for part in list(self.parts.values()):
            with part.changed:
                part.changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether all parties are gone."""
        return not self.calls.living

    # State of the optimizer

    def state(self, number: int) -> list[tuple[str, str, Tensor]]:
        """Return name, kind and value of each state of a part."""
        part = self.part(number)
        if part.optimizer is None:
            return []
        with part.changed:
            return whole_state(part.stored, part.optimizer)

    def put_state(self, number: int, index: int) -> tuple[Tensor, Callable[[], None]]:
        """Return the memory of a state, and what to call when it has been written.

        index: its place among the states of the part, with master weights as 0 if there are any.
        """
        part = self.part(number)
        optimizer = part.optimizer
        assert optimizer is not None
        views = list(optimizer.states[0].views)
        if optimizer.master is not None:
            views.insert(0, optimizer.master)
        return views[index].view(-1), part.mark_state


def described(named: list[tuple[str, str, Tensor]]) -> str:
    """Return the forms of states as JSON."""
    forms: list[Any] = [
        [name, kind, short(value.dtype), list(value.shape)] for name, kind, value in named
    ]
    return json.dumps(forms)
