"""What crosses the links for one key: gradients and values of its parts, whole or encoded.

    push    residual += gradient;  send encode(residual);  residual -= decode(what was sent)
    pull    the server sends encode(value - held);  both sides:  held += decode(what was sent)

`residual` belongs to the sender and `held` to the receiver: a worker in the modes async and stale,
a host in mode sync, whose workers share both. Weights do not drift: what a pull drops is still part
of value - held at the next one. The first pull is whole, so both sides start from the same value,
and they continue with the same additions, so `held` has the same bits on both.

Parts are encoded as they are sent and decoded as they arrive, in the thread that talks to the links
(`links.all_links`), so that this overlaps with the transfer of other parts.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from allstep.compression import Codec, ErrorFeedback, add_decoded, decode, encoded_nbytes
from allstep.kvstore.links.all_links import Request
from allstep.kvstore.links.pair import as_bytes
from allstep.kvstore.memory.key_memory import StoredKey
from allstep.kvstore.rules.codecs import Codecs
from allstep.kvstore.rules.headers import (
    DIFFERENCE,
    FIRST,
    NOT_FINITE,
    REPLACES,
    WHOLE,
    Header,
    Kind,
)
from allstep.kvstore.rules.placement import PlacedPart


class KeyWire:
    """One key on the links of a worker.

    parts: where it is. codecs: of the store. residual: memory for what has not been sent yet, zero
    at first; None: of this worker alone. `stored.flat` is the value that is held.
    """

    def __init__(
        self,
        stored: StoredKey,
        parts: Sequence[PlacedPart],
        codecs: Codecs,
        residual: Tensor | None = None,
    ) -> None:
        self._stored, self._parts = stored, parts
        self._push, self._pull = codecs.of(stored.dtype)
        self._has_pulled = False
        self._feedback: list[ErrorFeedback] = []
        if self._push is not None:
            rest = torch.zeros(stored.form.numel) if residual is None else residual
            self._feedback = [ErrorFeedback(self._push, rest[slice(*p.span)]) for p in parts]
        # Memory for encoded parts, by their size; no more than are on their way at once.
        self._free: dict[int, list[Tensor]] = {}

    def push(
        self,
        index: int,
        gradient: Callable[[], Tensor],
        kind: Kind = Kind.PUSH,
    ) -> Request:
        """Return the request that pushes a part. gradient: returns it, when it is sent."""
        part = self._parts[index]
        return Request(part.server, Header(kind, part.number), partial(self._sent, index, gradient))

    def _sent(self, index: int, gradient: Callable[[], Tensor]) -> Tensor:
        """Return the bytes of a gradient; they are sent before the next ones are asked for."""
        if self._push is None:
            return as_bytes(gradient())
        flat = gradient()
        room = self._room(encoded_nbytes(self._push, flat.numel()))
        self._free[room.numel()].append(room)
        return self._feedback[index].encode(flat, room)

    def pull(
        self,
        index: int,
        out: Tensor,
        pushed: Request | None = None,
        *,
        number: int = 0,
        done: Callable[[], None] | None = None,
    ) -> Request:
        """Return the request that pulls a part into its place in `out`, flat and of the key's size.

        pushed: a push that is made first. number: the round that the value must contain. done:
        called when the value is there.
        """
        part = self._parts[index]
        base = pushed or Request(part.server, Header(Kind.PULL, part.number))
        room = out[slice(*part.span)]
        if self._pull is None or not self._has_pulled:
            form = WHOLE if self._pull is None else FIRST
            header = base.header._replace(a=number, b=room.numel() * room.itemsize, c=form)
            arrived = partial(self._whole, index, room, done)
            return base._replace(header=header, answer=as_bytes(room), arrived=arrived)
        nbytes = encoded_nbytes(self._pull, room.numel())
        header = base.header._replace(a=number, b=nbytes, c=DIFFERENCE)
        arrived = partial(self._add, self._pull, index, room, done)
        return base._replace(header=header, answer=partial(self._room, nbytes), arrived=arrived)

    def whole(self, index: int, out: Tensor) -> Request:
        """Return the request for the exact value of a part, which changes nothing that is held."""
        part, room = self._parts[index], out[slice(*self._parts[index].span)]
        header = Header(Kind.PULL, part.number, b=room.numel() * room.itemsize, c=WHOLE)
        return Request(part.server, header, None, as_bytes(room))

    def has_pulled(self) -> None:
        """Note that all parts are held: from now on differences are enough."""
        self._has_pulled = True

    def _room(self, nbytes: int) -> Tensor:
        free = self._free.setdefault(nbytes, [])
        return free.pop() if free else torch.empty(nbytes, dtype=torch.uint8)

    def _whole(
        self,
        index: int,
        room: Tensor,
        done: Callable[[], None] | None,
        header: Header,
        found: Tensor | None,
    ) -> None:
        """Keep a whole value for the differences that follow."""
        if self._pull is not None:
            _copy(self._held(index), room)
        if done is not None:
            done()

    def _add(
        self,
        codec: Codec,
        index: int,
        room: Tensor,
        done: Callable[[], None] | None,
        header: Header,
        found: Tensor | None,
    ) -> None:
        """Add a difference to the value that is held, as the server has done."""
        assert found is not None
        held = self._held(index)
        if header.c == NOT_FINITE:
            held.fill_(torch.nan)
        elif header.c == REPLACES:
            decode(codec, found, held)
        else:
            add_decoded(codec, found, held)
        self._free[found.numel()].append(found)
        _copy(room, held)
        if done is not None:
            done()

    def _held(self, index: int) -> Tensor:
        return self._stored.flat[slice(*self._parts[index].span)]


def _copy(to: Tensor, value: Tensor) -> None:
    """Copy, unless both are the same memory: workers of a host pull into what they share."""
    if to.data_ptr() != value.data_ptr():
        to.copy_(value)
