"""The links of one worker to all servers of a store: requests, pipelined, and the loss of a server.

Requests to all servers are sent one after the other, without waiting for the answers of earlier
ones: up to `_WINDOW` answers of a server may be outstanding, and memory to receive them is ready
before the request is sent. So the bytes of both directions and of all servers overlap, slice by
slice.

Everything that waits for Gloo runs in a helper thread (`comm.health.helper_thread`). Twenty times a
second this worker meanwhile looks at its connections, at the end of its elastic generation and at
the limits of `BoundedWait`. A lost server is a PeerLost that names it and its host; the links of a
store that has failed are not used again.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from allstep.comm.health.helper_thread import call_in_thread
from allstep.errors import (
    AllstepError,
    CollectiveMismatch,
    CommError,
    PeerLost,
    UserError,
)
from allstep.kvstore.links.loss_log import LossLog
from allstep.kvstore.links.pair import Incoming, Pair, bytes_text
from allstep.kvstore.links.server_loss import ServerLost
from allstep.kvstore.links.talk import talk
from allstep.kvstore.memory.bounded_wait import BoundedWait, Others
from allstep.kvstore.rules.headers import ANSWERED, OK, Header, Kind

T = TypeVar("T")

_WINDOW = 8
_BYE_SECONDS = 2.0
_COMM_ERRORS = {error.__name__: error for error in (CollectiveMismatch, CommError, PeerLost)}


Room = Tensor | Callable[[], Tensor] | None
"""Bytes, or what returns them when they are needed."""


class Request(NamedTuple):
    """A message to one server.

    payload: bytes to send; they may change once they are sent. answer: room for those of the
    answer. arrived: called with header and room of an answer that is no error.
    """

    server: int
    header: Header
    payload: Room = None
    answer: Room = None
    arrived: Callable[[Header, Tensor | None], None] | None = None


class _Waiting(NamedTuple):
    """An answer that is on its way."""

    incoming: Incoming
    request: Request
    room: Tensor | None

    def wait(self, one: threading.Lock) -> tuple[int, Header]:
        """Return its server and its header, once it is here. one: held while it is used."""
        header = self.incoming.wait()
        if header.status == OK and self.request.arrived is not None:
            with one:
                self.request.arrived(header, self.room)
        return self.request.server, header


class Links:
    """Links to all servers of a store, by the number of the server.

    pairs: this worker's ends. hosts: where the servers are. others: who waits, for reports.
    With `survives` a lost server is a ServerLost, and the links to the others continue.
    """

    def __init__(self, pairs: Sequence[Pair], hosts: Sequence[str], others: Others) -> None:
        self._pairs, self._hosts, self._others = pairs, hosts, others
        self._failure: CommError | None = None
        self.survives = False
        self.log: LossLog | None = None
        self.dead: dict[int, str] = {}
        """Servers that are lost, and why."""
        # Encoded values use the same memory for all servers, one after the other.
        self._one = threading.Lock()

    @property
    def living(self) -> list[int]:
        """The servers that are not lost."""
        return [server for server in range(len(self)) if server not in self.dead]

    def __len__(self) -> int:
        return len(self._pairs)

    def run(self, requests: Sequence[Request], text: str) -> None:
        """Send all requests and wait for their answers. text: the call, for reports."""
        if self.survives:
            jobs: dict[int, list[Request]] = {}
            for each in requests:
                jobs.setdefault(each.server, []).append(each)
            acts = {server: partial(self._run, mine) for server, mine in jobs.items()}
            found = [each for mine in self._apart(acts, text).values() for each in mine]
        else:
            found = self._guarded(lambda: self._run(requests), text)
        self._raise_from({server for server, header in found if header.status != OK}, text)

    def run_on_all(self, header: Header, text: str, payload: Tensor | None = None) -> None:
        """Send one request that has no answer to all servers."""
        self.run([Request(server, header, payload) for server in self.living], text)

    def _run(self, requests: Sequence[Request]) -> list[tuple[int, Header]]:
        pending: list[deque[_Waiting]] = [deque() for _ in self._pairs]
        found = []
        for request in requests:
            pair, waiting = self._pairs[request.server], pending[request.server]
            if request.header.kind in ANSWERED:
                while len(waiting) >= _WINDOW:
                    found.append(waiting.popleft().wait(self._one))
                with self._one:
                    room = _made(request.answer)
                waiting.append(_Waiting(pair.begin_receive(room), request, room))
            with self._one:
                pair.send(request.header, _made(request.payload))
        return found + [each.wait(self._one) for waiting in pending for each in waiting]

    def ask(
        self, server: int, header: Header, text: str, payload: Tensor | None = None
    ) -> tuple[Header, Tensor]:
        """Send one request whose answer may have any size; return the answer."""
        answer, data = self._at(server, lambda: self._ask(server, header, payload), text)
        self._raise_from({server} if answer.status != OK else (), text)
        return answer, data

    def ask_all(self, header: Header, text: str, payload: Tensor | None) -> list[Tensor]:
        """Send one request to all servers, and then wait for their answers, of any size."""
        if self.survives:
            acts = {each: partial(self._ask, each, header, payload) for each in self.living}
            answers = self._apart(acts, text)
            self._raise_from({each for each in answers if answers[each][0].status != OK}, text)
            return [data for _, data in answers.values()]

        def act() -> list[tuple[Header, Tensor]]:
            for pair in self._pairs:
                pair.send(header, payload)
            return [self._answer(pair) for pair in self._pairs]

        found = self._guarded(act, text)
        failed = {server for server, (answer, _) in enumerate(found) if answer.status != OK}
        self._raise_from(failed, text)
        return [data for _, data in found]

    def _ask(self, server: int, header: Header, payload: Tensor | None) -> tuple[Header, Tensor]:
        self._pairs[server].send(header, payload)
        return self._answer(self._pairs[server])

    @staticmethod
    def _answer(pair: Pair) -> tuple[Header, Tensor]:
        answer = pair.receive()
        data = torch.empty(answer.nbytes, dtype=torch.uint8)
        pair.receive_into(data)
        return answer, data

    def check(self, text: str) -> None:
        """Raise what went wrong on a server since its last answer."""
        self.ask_all(Header(Kind.CHECK), text, None)

    def _raise_from(self, servers: Collection[int], text: str) -> None:
        """Raise the error of the first of these servers; all of them forget theirs."""
        errors = [self._error_of(server, text) for server in sorted(servers)]
        if errors:
            raise errors[0]

    def _error_of(self, server: int, text: str) -> AllstepError:
        _, data = self._at(server, lambda: self._ask(server, Header(Kind.WHY), None), text)
        found = json.loads(bytes_text(data))
        if found["error"] == UserError.__name__:
            return UserError(f"{found['text']} ({self.name(server)})")
        error = _COMM_ERRORS.get(found["error"], CommError)
        return error(found["text"], rank=self._rank, peer=found["peer"])

    # Waiting, and the loss of a server

    def _at(self, server: int, act: Callable[[], T], text: str) -> T:
        """Talk to one server."""
        return (
            self._apart({server: act}, text)[server] if self.survives else self._guarded(act, text)
        )

    def _apart(self, acts: Mapping[int, Callable[[], T]], text: str) -> dict[int, T]:
        """Talk to each server in a thread of its own, so that a lost one holds up no other.

        Raise ServerLost after all others have answered.
        """
        if self._failure is not None:
            raise self._failure
        gone = next((server for server in acts if server in self.dead), None)
        if gone is not None:
            raise self._server_lost(gone, text)
        waiting = BoundedWait(self._others, text)
        try:
            found, lost = talk(acts, self._pairs, lambda: waiting.check_limits("the servers"))
        except CommError as error:
            self.fail(error)
            raise
        try:
            for server, why in lost.items():
                self._note_lost(server, why)
        except CommError as error:
            # This side may be the one that is cut off: it must not continue alone.
            self.fail(error)
            raise
        if lost and not self.living:
            self.fail(self._server_lost(min(lost), text))
            assert self._failure is not None
            raise self._failure
        if lost:
            raise self._server_lost(min(lost), text)
        return found

    def _note_lost(self, server: int, why: str) -> None:
        """Count a server as lost, and those that other workers have found lost before."""
        if server in self.dead:
            return
        self.dead[server] = why
        self._pairs[server].shut()
        for each in [] if self.log is None else self.log.enter(server):
            if each not in self.dead:
                self.dead[each] = "as another worker found"
                self._pairs[each].shut()

    def _server_lost(self, server: int, text: str) -> PeerLost:
        name, why = self.name(server), self.dead[server]
        if not self.living:
            return PeerLost(
                f"{text}: lost {name} ({why}), the last server; start again from a checkpoint",
                rank=self._rank,
            )
        text_of_loss = f"{text}: lost {name} ({why}), which had a part of all values"
        return ServerLost(text_of_loss, rank=self._rank, server=server)

    def _guarded(self, act: Callable[[], T], text: str) -> T:
        """Run `act` in a helper thread and check the servers meanwhile."""
        if self._failure is not None:
            raise self._failure
        waiting = BoundedWait(self._others, text)
        try:
            result: T = call_in_thread(act, lambda: self._check(waiting, text))
        except CommError as error:
            self.fail(error)
            raise
        except AllstepError:
            raise
        # Gloo raises RuntimeError, BadHeader is a ValueError.
        except (RuntimeError, ValueError) as error:
            lost = self._lost(text) or CommError(
                f"{text}: a link to a server failed: {str(error).partition(chr(10))[0]}",
                rank=self._rank,
            )
            self.fail(lost)
            raise lost from error
        return result

    def _check(self, waiting: BoundedWait, text: str) -> None:
        if (lost := self._lost(text)) is not None:
            raise lost
        waiting.check_limits("the servers, or workers for which they wait")

    def _lost(self, text: str) -> PeerLost | None:
        for server, pair in enumerate(self._pairs):
            if (why := pair.ended()) is not None:
                return PeerLost(
                    f"{text}: lost {self.name(server)} ({why}), which had a part of all values;"
                    " start again from a checkpoint",
                    rank=self._rank,
                )
        return None

    def name(self, server: int) -> str:
        """Return number and host of a server."""
        return f"server {server} on {self._hosts[server]}"

    @property
    def _rank(self) -> int:
        return self._others.names[self._others.rank]

    def fail(self, error: CommError) -> None:
        """End all links; every later call raises this error."""
        if self._failure is None:
            self._failure = error
            for pair in self._pairs:
                pair.shut()

    def close(self) -> None:
        """Send `bye` to all servers, so that they do not count this worker as lost."""
        if self._failure is not None:
            return
        end = _End()
        try:
            call_in_thread(self._send_bye, end.check)
        except Exception:
            for pair in self._pairs:
                pair.shut()
        self._failure = CommError("the links of this store are closed", rank=self._rank)

    def _send_bye(self) -> None:
        for server in self.living:
            self._pairs[server].send(Header(Kind.BYE))
            self._pairs[server].close()


def _made(room: Room) -> Tensor | None:
    return room() if callable(room) else room


class _End:
    """Ends a wait after 2 s: a server that does not read must not hold up the end of a worker."""

    def __init__(self) -> None:
        self._left = int(_BYE_SECONDS / 0.05)

    def check(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TimeoutError
