"""The thread that serves one link: it receives a message, carries it out, and sends the answer.

It waits for messages in C++, without the interpreter lock. An error of a request that has no answer
is kept and reported with the next answer: as `FAILED`, after which the worker asks `why`.

When a connection ends in the middle of a message, Gloo does not wake this thread. Then `look`,
called by the process's main thread, finds the connection closed and counts the party as lost; the
thread is abandoned.
"""

import json
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from allstep.compression import decode, encoded_nbytes
from allstep.errors import AllstepError, CommError
from allstep.kvstore.links.pair import Pair, as_bytes, bytes_text, text_bytes
from allstep.kvstore.rules.headers import ANSWERED, DIFFERENCE, FAILED, FIRST, Header, Kind
from allstep.kvstore.serving.served_store import ServedStore, described
from allstep.limits import Limits

# Seconds without a message after which a connection that has ended holds none.
_GRACE = 1.0


class LinkThread:
    """Serves the link of one party of a store.

    Connects first: raises RuntimeError if the worker does not come.
    """

    def __init__(self, served: ServedStore, party: int, store: Store, limits: Limits) -> None:
        self._served, self._party = served, party
        self._pair = Pair(served.announced.link(store, party), limits, is_server=True)
        self._error: Exception | None = None
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._received = False
        self._is_over = False
        # When the connection was found ended, and how many messages had been received by then.
        self._ended_at, self._num_seen, self._num_messages = 0.0, -1, 0
        self._handlers: dict[Kind, Callable[[Header], None]] = {
            Kind.INIT: self._init,
            Kind.VALUE: self._value,
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.PUSHPULL: self._pushpull,
            Kind.PUSH_ROWS: self._push_rows,
            Kind.PULL_ROWS: self._pull_rows,
            Kind.OPTIMIZER: self._optimizer,
            Kind.CODECS: lambda header: self._served.set_codecs(self._text(header)),
            Kind.STATE: self._state,
            Kind.STATE_VALUE: self._state_value,
            Kind.PUT_STATE: self._put_state,
            Kind.COLLECT: self._collect,
            Kind.DROP: lambda _: self._served.drop(),
            Kind.CHECK: lambda header: self._answer(header, text_bytes("")),
            Kind.REST: lambda _: self._served.rest(self._party),
            Kind.WAKE: lambda header: self._answer(
                header, text_bytes(self._served.wake(self._party))
            ),
            Kind.WHY: self._why,
            Kind.OFFER: self._offer,
            Kind.TAKE: self._take,
        }
        name = f"allstep-link-{party}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether the party has left or is lost."""
        return self._is_over

    def look(self) -> None:
        """Count the party as lost if its connection has ended and no message is left in it.

        The thread first receives what the party had sent: pushes, and maybe `bye`.
        """
        if self._is_over or self._pair.ended() is None:
            return
        now = time.monotonic()
        if self._num_seen != self._num_messages:
            self._num_seen, self._ended_at = self._num_messages, now
        if now - self._ended_at > _GRACE:
            self._end(in_order=False)

    def _end(self, *, in_order: bool) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._served.leave(self._party, in_order=in_order)
        if in_order:
            self._pair.close()
        else:
            self._pair.shut()

    def _run(self) -> None:
        try:
            while (header := self._pair.receive()).kind is not Kind.BYE:
                self._num_messages += 1
                self._handle(header)
        # Of Gloo, when the connection has ended, or a header that is none.
        except Exception:
            self._end(in_order=False)
        else:
            self._end(in_order=True)

    def _handle(self, header: Header) -> None:
        self._received = False
        try:
            if self._error is not None and header.kind is not Kind.WHY:
                raise self._error
            self._handlers[header.kind](header)
        except AllstepError as error:
            self._fail(header, error)
        # Of an optimizer: a mistake of the script, which must reach it.
        except (RuntimeError, ValueError, TypeError, KeyError, MemoryError) as error:
            if self._pair.ended() is not None:
                raise
            text = f"{header.kind.name.lower()}: {type(error).__name__}: {error}"
            self._fail(header, CommError(f"kvstore: the server failed: {text}"))

    def _fail(self, header: Header, error: Exception) -> None:
        """Keep an error, and answer with it if there is an answer."""
        self._error = error
        if not self._received and header.nbytes:
            self._pair.receive_into(torch.empty(header.nbytes, dtype=torch.uint8))
        if header.kind not in ANSWERED:
            return
        # The worker waits for as many bytes as it asked for.
        is_data = header.kind in (Kind.PULL, Kind.PUSHPULL, Kind.PULL_ROWS, Kind.STATE_VALUE)
        nbytes = header.b if is_data else 0
        answer = Header(Kind.ANSWER, header.part, status=FAILED)
        self._pair.send(answer, torch.empty(nbytes, dtype=torch.uint8))

    # Requests

    def _payload(self, header: Header, to: Tensor | None = None) -> Tensor:
        """Receive the payload, as bytes or into a tensor of its size."""
        room = torch.empty(header.nbytes, dtype=torch.uint8) if to is None else as_bytes(to)
        if room.numel() != header.nbytes:
            raise CommError(
                f"kvstore: {header.kind.name.lower()} of part {header.part} has {header.nbytes}"
                f" bytes, expected {room.numel()}"
            )
        self._received = True
        self._pair.receive_into(room)
        return room

    def _text(self, header: Header) -> str:
        return bytes_text(self._payload(header))

    def _answer(self, header: Header, payload: Tensor, number: int = 0, meaning: int = 0) -> None:
        self._pair.send(Header(Kind.ANSWER, header.part, a=number, c=meaning), payload)

    def _init(self, header: Header) -> None:
        self._served.add(header.part, self._text(header))

    def _value(self, header: Header) -> None:
        form = self._served.part(header.part).form
        value = torch.empty(form.numel, dtype=form.dtype)
        self._payload(header, value)
        self._served.set_value(header.part, value)

    def _push(self, header: Header) -> None:
        if self._served.is_sync:
            self._served.wait_for_turn(self._party, header.part)
            self._gradient(header, self._served.room(self._party, header.part))
            self._served.contribute(self._party, header.part)
        else:
            form = self._served.part(header.part).form
            gradient = self._scratch_for(form.dtype, form.numel)
            self._gradient(header, gradient)
            self._served.push(self._party, header.part, gradient)

    def _gradient(self, header: Header, to: Tensor) -> None:
        """Receive a gradient, and decode it if the store has a codec for pushes."""
        codec = self._served.codecs.of(to.dtype).push
        if codec is None:
            self._payload(header, to)
            return
        encoded = self._scratch_for(torch.uint8, encoded_nbytes(codec, to.numel()))
        self._payload(header, encoded)
        decode(codec, encoded, to)

    def _pull(self, header: Header) -> None:
        part = self._served.part(header.part)
        if self._served.is_sync:
            self._served.wait_for_round(header.part, header.a)
        if header.c == DIFFERENCE:
            encoded = self._scratch_for(torch.uint8, header.b)
            version, meaning = part.encoded(self._party, encoded)
            self._answer(header, encoded, version, meaning)
        else:
            value = self._scratch_for(part.form.dtype, part.form.numel)
            version = part.copy(self._party, value, is_held=header.c == FIRST)
            self._answer(header, as_bytes(value), version)

    def _pushpull(self, header: Header) -> None:
        self._push(header)
        self._pull(header)

    def _push_rows(self, header: Header) -> None:
        part = self._served.part(header.part)
        if self._served.is_sync:
            self._served.wait_for_turn(self._party, header.part)
        rows = part.rows_in(self._payload(header), header.a)
        if self._served.is_sync:
            self._served.contribute(self._party, header.part, rows)
        else:
            self._served.push(self._party, header.part, rows)

    def _pull_rows(self, header: Header) -> None:
        part = self._served.part(header.part)
        numbers = self._payload(header).view(torch.int64)
        if self._served.is_sync:
            self._served.wait_for_round(header.part, header.a)
        values, version = part.copy_rows(self._party, numbers)
        self._answer(header, as_bytes(values), version)

    def _scratch_for(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return memory that the next message overwrites: one is received or sent at a time."""
        found = self._scratch.get(dtype)
        if found is None or found.numel() < numel:
            found = self._scratch[dtype] = torch.empty(numel, dtype=dtype)
        return found[:numel]

    def _optimizer(self, header: Header) -> None:
        self._served.set_optimizer(self._text(header))

    def _state(self, header: Header) -> None:
        self._answer(header, text_bytes(described(self._served.state(header.part))))

    def _state_value(self, header: Header) -> None:
        value = self._served.state(header.part)[header.a][2]
        self._answer(header, as_bytes(value.reshape(-1)))

    def _put_state(self, header: Header) -> None:
        room, done = self._served.put_state(header.part, header.a)
        self._payload(header, room)
        done()

    def _offer(self, header: Header) -> None:
        self._answer(header, text_bytes(self._served.offer(self._party, self._text(header))))

    def _take(self, header: Header) -> None:
        """Receive a copy: the length of its form as text in `a`, the form, then the value."""
        data = self._payload(header)
        self._served.take(header.part, bytes_text(data[: header.a]), data[header.a :])

    def _collect(self, header: Header) -> None:
        what, text = json.loads(self._text(header))
        found = self._served.collect(
            self._party, what, text, needs_all=bool(header.a), number=header.b
        )
        self._answer(header, text_bytes(found))

    def _why(self, header: Header) -> None:
        error, self._error = self._error, None
        text = {
            "error": type(error).__name__,
            "text": str(error),
            "peer": getattr(error, "peer", None),
        }
        self._answer(header, text_bytes(json.dumps(text)))
