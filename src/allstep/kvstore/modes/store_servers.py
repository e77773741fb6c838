"""The servers of a store over several hosts, as one worker sees them.

Both modes use it (`served_rounds`, `served_pushes`): it places keys on servers, sends their first
values, the optimizer and its state, and makes the calls that all workers make together. These go
through server 0, which knows the parties that are lost on any host.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from allstep.comm.group.init import session
from allstep.comm.group.joined import Joined
from allstep.comm.join.launcher_store import reason_of_end
from allstep.console.escape import print_notice
from allstep.errors import ConfigError, PeerLost, UserError
from allstep.kvstore.links.all_links import Links, Request
from allstep.kvstore.links.announced import COUNT
from allstep.kvstore.links.connect import connected, host_numbers
from allstep.kvstore.links.pair import as_bytes, bytes_text, text_bytes
from allstep.kvstore.links.server_loss import ServerLost
from allstep.kvstore.memory.key_memory import KeyShape, StoredKey
from allstep.kvstore.modes.key_values import Updater
from allstep.kvstore.modes.part_forms import part_text
from allstep.kvstore.rules.codecs import Codecs
from allstep.kvstore.rules.headers import Header, Kind
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.placement import PlacedPart, Placement
from allstep.kvstore.rules.store_kinds import StoreKind
from allstep.kvstore.updates.imported_class import optimizer_text
from allstep.kvstore.updates.key_optimizer import StatePlan
from allstep.kvstore.updates.optimizer_class import OptimizerClass
from allstep.kvstore.updates.states_file import MASTER, Expected, Named
from allstep.limits import read_limits


def num_started() -> int:
    """Return the number of servers that `allstep run` has started; 0 if it has started none."""
    text = os.environ.get(COUNT, "")
    if text and not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{COUNT}={text!r}: expected the number of servers")
    return int(text or 0)


def needs_servers(joined: Joined) -> bool:
    """Return whether a store has servers: with several hosts, or if the user started some."""
    return num_started() > 0 or len(set(joined.nodes)) > 1


class StoreServers:
    """The servers of one store. All workers create it together."""

    def __init__(self, kind: StoreKind) -> None:
        self.kind = kind
        self._joined: Joined | None = session().join()
        self._pid = os.getpid()
        try:
            world = self._joined.world
            self.rank, self.size = world.rank, world.size
            self.names, self.limits = list(range(world.size)), read_limits()
            self.hosts = host_numbers(self._joined)
            self._links: Links = connected(self._joined, kind, num_started(), self)
        except BaseException:
            self._leave()
            raise
        # One of them keeps the barriers of sync, and the values cannot be restored in a round.
        self._links.survives = kind.mode != "sync" and len(self._links) > 1
        self._placement = Placement(len(self._links))
        self._has_warned = False
        self.parts: dict[Key, list[PlacedPart]] = {}
        self._num_calls = 0
        self.homes: dict[int, int] = {}
        """The server of each part as it was placed first."""
        self.chosen: OptimizerClass | None = None

    @property
    def members(self) -> list[int]:
        """The ranks of this host."""
        own = self.hosts[self.rank]
        return [rank for rank, host in enumerate(self.hosts) if host == own]

    @property
    def num_servers(self) -> int:
        """The number of servers, with those that are lost."""
        return len(self._links)

    @property
    def lost(self) -> Mapping[int, str]:
        """The servers that are lost, and why."""
        return self._links.dead

    def lost_text(self, server: int) -> str:
        """Return number, host and reason of a lost server."""
        return f"{self._links.name(server)} ({self._links.dead[server]})"

    def ask(self, server: int, header: Header, text: str, call: str) -> Any:
        """Send a text to one server; return its answer, from JSON."""
        _, data = self._links.ask(server, header, call, text_bytes(text))
        return json.loads(bytes_text(data))

    # What waits need to know

    def is_lost(self, rank: int, closely: bool) -> bool:
        """Return False: servers report lost workers."""
        return False

    def why_lost(self, rank: int) -> str:
        """Return why a worker is lost."""
        return "its link has ended"

    def check_generation(self) -> None:
        """Raise PeerLost if the generation of an elastic run has ended."""
        joined = self._joined
        if joined is not None and (reason := reason_of_end(joined.rendezvous.store)) is not None:
            raise PeerLost(reason, rank=self.rank)

    # Calls of all workers

    def collect(self, what: str, text: str, *, needs_all: bool = True) -> list[str]:
        """Return the text that each worker passes, by rank.

        needs_all: raise PeerLost if a worker is gone, whose text would be None.
        """
        # Counted also if it fails, as on all workers; but not if its server is lost: then it is
        # made again.
        header = Header(Kind.COLLECT, a=needs_all, b=self._num_calls + 1)
        payload = text_bytes(json.dumps([what, text]))
        living = self._links.living
        try:
            _, data = self._links.ask(
                living[0] if living else 0, header, f"kvstore, {what}", payload
            )
        except ServerLost:
            raise
        except BaseException:
            self._num_calls += 1
            raise
        self._num_calls += 1
        found: list[str] = json.loads(bytes_text(data))
        return found

    def check_same(self, call: str, own: Sequence[str]) -> None:
        """Raise UserError on all workers if they pass different texts."""
        found = [json.loads(text) for text in self.collect(call, json.dumps(list(own)))]
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                ours, other = _first_difference(found[0], theirs)
                raise UserError(
                    f"{call}: rank 0 passes {ours}, rank {rank} passes {other}; pass the same on"
                    " all workers"
                )

    def barrier(self, *, needs_all: bool) -> set[int]:
        """Wait for all workers, until the servers have received all of their pushes.

        Return the parts for which this worker's gradient has become too old (mode stale).
        needs_all: raise PeerLost if a worker is gone.
        """
        text = "kvstore, barrier"
        # Answered after all pushes that this worker has sent.
        self._links.check(text)
        if self.kind.mode != "stale":
            self.collect("barrier", "", needs_all=needs_all)
            return set()
        self._links.run_on_all(Header(Kind.REST), text)
        try:
            self.collect("barrier", "", needs_all=needs_all)
        finally:
            late = self._wake(text)
        # No worker pushes before all have been woken, so all find the same gradients too old.
        self._end_barrier(needs_all=needs_all)
        return late

    def _wake(self, text: str) -> set[int]:
        """Let the servers count this worker's reads again; return the parts that are too old.

        A server that is lost meanwhile does not begin the barrier again: the others have passed
        it. Its parts have no reads at the server that continues them.
        """
        late: set[int] = set()
        for server in self._links.living:
            try:
                _, data = self._links.ask(server, Header(Kind.WAKE), text)
            except ServerLost:
                continue
            late |= set(json.loads(bytes_text(data)))
        return late

    def _end_barrier(self, *, needs_all: bool) -> None:
        """Wait until all have been woken; again through another server if the first is lost."""
        while True:
            try:
                self.collect("end of barrier", "", needs_all=needs_all)
            except ServerLost:
                continue
            return

    def from_rank_0(self, call: str, act: Callable[[], None]) -> None:
        """Run `act` in rank 0 while the others wait; raise its UserError on all of them."""
        problem = ""
        if self.rank == 0:
            try:
                act()
            except UserError as error:
                problem = str(error)
        if problem := self.collect(f"{call}, done", problem)[0]:
            raise UserError(problem)

    # Keys

    def place(self, forms: Sequence[KeyShape]) -> list[KeyShape]:
        """Place new keys; return their forms with the parts as slices."""
        sizes = {form.key: (form.numel, form.dtype.itemsize, form.width) for form in forms}
        placed = self._placement.add(sizes)
        self.parts.update(placed)
        for parts in placed.values():
            self.homes.update((part.number, part.server) for part in parts)
        return [
            KeyShape(
                form.key, form.shape, form.dtype, tuple(part.span for part in placed[form.key])
            )
            for form in forms
        ]

    def warn_if_idle(self) -> None:
        """Print once that some servers store nothing, when the keys have been placed."""
        idle = sum(not used for used in self._placement.fill)
        if self.rank == 0 and idle and self.parts and not self._has_warned:
            self._has_warned = True
            num, parts = len(self._links), sum(map(len, self.parts.values()))
            print_notice(
                f"kvstore: {num} servers, but the values have {parts}"
                f" slice{'s' if parts > 1 else ''}: {idle} of the servers store nothing; fewer"
                " servers do the same"
            )

    def send_values(self, forms: Sequence[KeyShape], values: Mapping[Key, Tensor]) -> None:
        """Send the first values of placed keys; called by rank 0."""
        requests = []
        for form in forms:
            flat = values[form.key].reshape(-1).contiguous()
            for part in self.parts[form.key]:
                start, end = part.span
                init, value = Header(Kind.INIT, part.number), Header(Kind.VALUE, part.number)
                requests.append(Request(part.server, init, text_bytes(part_text(form, part))))
                requests.append(Request(part.server, value, as_bytes(flat[start:end])))
        self._links.run(requests, "init")
        self._links.check("init")

    def place_whole(self) -> None:
        """Forget all parts, and cut no key from now on: an optimizer needs whole layers."""
        self.parts.clear()
        self.homes.clear()
        self._placement = Placement(len(self._links), is_whole=True)
        if self.rank == 0:
            self._links.run_on_all(Header(Kind.DROP), "set_optimizer")

    @property
    def is_whole(self) -> bool:
        """Whether no key is cut."""
        return self._placement.is_whole

    def use_whole_keys(self) -> None:
        """Cut none of the keys that come from now on."""
        self._placement.is_whole = True

    # Values

    def run(self, requests: Sequence[Request], text: str) -> None:
        """Send requests and wait for their answers."""
        self._links.run(requests, text)

    def set_codecs(self, codecs: Codecs) -> None:
        """Encode what is sent from now on, on all workers and servers."""
        call = "set_gradient_compression"
        self.check_same(call, [codecs.text])
        self.from_rank_0(call, lambda: self._send_codecs(codecs.text, call))

    def _send_codecs(self, codecs: str, call: str) -> None:
        self._links.run_on_all(Header(Kind.CODECS), call, text_bytes(codecs))
        self._links.check(call)

    # Optimizer

    def send_optimizer(self, chosen: OptimizerClass) -> None:
        """Send class and settings to all servers; called by rank 0."""
        text = text_bytes(optimizer_text(chosen, sys.path[0] if sys.path else ""))
        self._links.run_on_all(Header(Kind.OPTIMIZER), "set_optimizer", text)
        self._links.check("set_optimizer")

    def state(self, stored: StoredKey) -> list[Named]:
        """Return the state of a key, joined from its parts; empty if it has had no update."""
        parts = [self._state_of(part) for part in self.parts[stored.key]]
        if not all(parts):
            return []
        found = []
        first_numel = self.parts[stored.key][0].span[1]
        for place, (name, kind, first) in enumerate(parts[0]):
            is_cut = len(parts) > 1 and first.dim() > 0 and first.numel() == first_numel
            value = torch.cat([part[place][2].view(-1) for part in parts]) if is_cut else first
            whole = value.numel() == stored.form.numel
            found.append((name, kind, value.view(stored.shape) if whole else value))
        return found

    def _state_of(self, part: PlacedPart) -> list[Named]:
        text = "save_optimizer_states"
        _, data = self._links.ask(part.server, Header(Kind.STATE, part.number), text)
        found = []
        for index, (name, kind, dtype, shape) in enumerate(json.loads(bytes_text(data))):
            value = torch.empty(torch.Size(shape).numel(), dtype=getattr(torch, dtype))
            nbytes = value.numel() * value.itemsize
            header = Header(Kind.STATE_VALUE, part.number, a=index, b=nbytes)
            self._links.run([Request(part.server, header, None, as_bytes(value))], text)
            found.append((name, kind, value.view(shape)))
        return found

    def expected_state(self, stored: StoredKey, chosen: OptimizerClass) -> Expected:
        """Return name, type and number of elements of each state of a key."""
        plan = StatePlan(chosen, stored.form)
        found: Expected = [(MASTER, (plan.dtype, stored.form.numel))] if plan.has_master else []
        for entry in plan.entries[0]:
            numel = torch.Size(entry.shape).numel()
            is_cut = self._is_cut(stored, entry.shape)
            found.append((entry.name, (entry.dtype, stored.form.numel if is_cut else numel)))
        return found

    def _is_cut(self, stored: StoredKey, shape: tuple[int, ...]) -> bool:
        parts = self.parts[stored.key]
        return len(parts) > 1 and shape == (parts[0].span[1],)

    def put_state(
        self, stored: StoredKey, chosen: OptimizerClass, values: Mapping[str, Tensor]
    ) -> None:
        """Send the state of a key to its servers; called by rank 0."""
        requests = self.state_requests(stored, chosen, values, self.parts[stored.key])
        self._links.run(requests, "load_optimizer_states")
        self._links.check("load_optimizer_states")

    def state_requests(
        self,
        stored: StoredKey,
        chosen: OptimizerClass,
        values: Mapping[str, Tensor],
        parts: Sequence[PlacedPart],
    ) -> list[Request]:
        """Return the requests that set the state of some parts of a key."""
        requests = []
        for index, (name, (dtype, numel)) in enumerate(self.expected_state(stored, chosen)):
            flat = values[name].reshape(-1).contiguous().to(dtype)
            for part in parts:
                start, end = part.span
                is_cut = numel == stored.form.numel and len(self.parts[stored.key]) > 1
                data = flat[start:end] if is_cut else flat
                header = Header(Kind.PUT_STATE, part.number, a=index)
                requests.append(Request(part.server, header, as_bytes(data)))
        return requests

    # The end

    def close(self) -> None:
        """Send `bye` to the servers and leave; the other workers continue."""
        if self._joined is not None and os.getpid() == self._pid:
            self._links.close()
        self._leave()

    def _leave(self) -> None:
        joined, self._joined = self._joined, None
        # A forked child drops its copy of the links; its parent continues.
        if joined is not None and os.getpid() == self._pid:
            session().part()


def refuse_updater(kind: StoreKind, updater: Updater) -> None:
    """Raise UserError: a function of one worker cannot run on servers."""
    raise UserError(
        f"set_updater: the values of this {kind.name!r} store are on servers, which cannot run a"
        " function of one worker; use set_optimizer, or a 'local' store"
    )


def _first_difference(one: list[str], other: list[str]) -> tuple[str, str]:
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            return ours, theirs
    return f"{len(one)} values", f"{len(other)} values"
