"""What the receivers of a part hold, so that a pull sends what has changed since, encoded.

    send encode(value - held);  held += decode(what was sent)

What the codec drops is part of value - held at the next pull: that is the residual, on the server.
A receiver adds what it decodes to its own copy, with the same operations, so both have the same
bits and weights do not drift.

======  ===========================================================================================
mode    receivers
======  ===========================================================================================
sync    all hosts, which receive every round once: one copy for all of them, and a round is encoded
        once. Without an optimizer the value of a round is a sum that has nothing in common with the
        last one: then the sum is sent, with error feedback
async,  each worker, with a copy of its own from its first pull on
stale
======  ===========================================================================================
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from allstep.compression import Codec, ErrorFeedback, decode, encoded_nbytes
from allstep.compression.blocks import blocks
from allstep.errors import CommError
from allstep.kvstore.rules.headers import ADDS, NOT_FINITE, REPLACES

_ALL = -1


class _Round(NamedTuple):
    """What was sent for a round of mode sync."""

    number: int
    meaning: int


class HeldValues:
    """The copies of one part. codec: of pulls. is_common: whether all receivers hold the same."""

    def __init__(self, codec: Codec, numel: int, *, is_common: bool) -> None:
        self._codec, self._is_common = codec, is_common
        self._held: dict[int, Tensor] = {}
        self._last = _Round(0, ADDS)
        self._encoded = torch.empty(encoded_nbytes(codec, numel), dtype=torch.uint8)
        # Of sums; differences need none.
        self._feedback = ErrorFeedback(codec)

    def hold(self, party: int, value: Tensor) -> None:
        """Note that a party has received this value, whole."""
        self._held[self._of(party)] = value.clone()

    def forget(self, party: int) -> None:
        """Drop the copy of a party that is gone."""
        self._held.pop(party, None)

    def _of(self, party: int) -> int:
        return _ALL if self._is_common else party

    def encoded(
        self, party: int, value: Tensor, number: int, *, is_sum: bool
    ) -> tuple[Tensor, int]:
        """Return what a party must receive to hold `value`, and what to do with it.

        number: of the round, in mode sync. is_sum: the value replaces the last one.
        """
        if (held := self._held.get(self._of(party))) is None:
            raise CommError("a pull of a difference comes before the first pull of the whole value")
        if not self._is_common:
            return self._encoded, self._difference(value, held)
        if number != self._last.number:
            meaning = self._sum(value, held) if is_sum else self._difference(value, held)
            self._last = _Round(number, meaning)
        return self._encoded, self._last.meaning

    def _sum(self, value: Tensor, held: Tensor) -> int:
        decode(self._codec, self._feedback.encode(value, self._encoded), held)
        return REPLACES

    def _difference(self, value: Tensor, held: Tensor) -> int:
        codec, numel, total = self._codec, value.numel(), 0.0
        change, sent = torch.empty(2, min(numel, codec.block or numel))
        for block in blocks(codec, numel):
            have, encoded = held[block.elements], self._encoded[block.encoded]
            rest, step = change[: have.numel()], sent[: have.numel()]
            torch.sub(value[block.elements], have, out=rest)
            total += float(rest.sum())
            codec.encode_block(rest, encoded)
            codec.decode_block(encoded, step)
            have.add_(step)
        if math.isfinite(total):
            return ADDS
        # Codecs of few bits would send zeros, and hide that the run has diverged.
        held.fill_(torch.nan)
        return NOT_FINITE
