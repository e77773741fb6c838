"""What an algorithm needs of a network: send to a rank, receive from a rank, wait.

An algorithm is written against `Exchange`, so the same code runs between hosts (`GlooExchange`), on
one host for study, and in a test where all ranks are threads of one process. The rules that
algorithms rely on:

* `send` and `recv` return at once. The tensor belongs to the transfer until its handle was waited
  for.
* Messages from one rank to another arrive in the order in which they were sent: the n-th message in
  the n-th posted receive.
* A posted receive writes into its tensor when the message arrives, not before. So a receive may be
  posted into memory that an earlier send still reads, as long as the message to come depends on the
  arrival of that send.
* Empty messages are not sent: both ends know the size and leave them out.

Over Gloo, a message is sent when its receive has been posted at the other end. So algorithms post
the receive of an answer before they send the request: that saves a round trip of Gloo, and Gloo's
own thread fills the buffer while ours adds. `received` implements this.

```
GlooLink    one per group: counts operations
  .operation() -> GlooExchange    one allreduce: its messages carry its own tag, so those of a rank
                                  that is ahead by one operation, or of two operations under way
                                  at once, are not mixed up
```
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, Work

from allstep.comm.op.reduction import FOLD
from allstep.comm.op.transport import Transport
from allstep.errors import CommError

# A function like torch.add: combine(a, b, out=a).
Combine = Callable[..., Tensor]

# Above the tags that users choose.
FIRST_TAG = 1 << 30
# The last tag, 2**31 - 1, is in use: see gloo.PRIVATE_TAG.
NUM_TAGS = (1 << 30) - 1


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Wait until the tensor may be used again (sent) or has its values (received).

        Raises if the peer is lost.
        """


class Exchange(Protocol):
    """The ranks of one operation, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, tensor: Tensor, peer: int) -> Handle: ...

    def recv(self, tensor: Tensor, peer: int) -> Handle: ...


@runtime_checkable
class HasAllReduce(Protocol):
    """An exchange on a network that can all-reduce by itself."""

    def all_reduce(self, flat: Tensor, combine: Combine) -> Handle: ...


class Message(NamedTuple):
    """A message to receive.

    `place` is the tensor that it is for. It is written there if `direct`, else into a buffer of the
    same size.
    """

    peer: int
    place: Tensor
    direct: bool = False


# A message, the tensor that will have its data, and the transfer.
Posted = tuple[Message, Tensor, Handle]


def received(
    exchange: Exchange, messages: Iterable[Message], ahead: int = 2
) -> Iterator[tuple[Message, Tensor]]:
    """Yield each message and its data, in the given order.

    The receives of the first `ahead` messages are posted at once, before the caller asks for the
    first; each later one is posted when an earlier message has been used. A buffer is reused for a
    later message as soon as the next one is asked for.
    """
    coming = iter(messages)
    posted = deque(_post(exchange, message, deque()) for message in itertools.islice(coming, ahead))
    return _arriving(exchange, posted, coming)


def _arriving(
    exchange: Exchange, posted: deque[Posted], coming: Iterator[Message]
) -> Iterator[tuple[Message, Tensor]]:
    buffers: deque[Tensor] = deque()
    while posted:
        message, data, handle = posted.popleft()
        handle.wait()
        yield message, data
        if not message.direct:
            buffers.append(data)
        posted.extend(
            _post(exchange, following, buffers) for following in itertools.islice(coming, 1)
        )


def _post(exchange: Exchange, message: Message, buffers: deque[Tensor]) -> Posted:
    data = message.place if message.direct else _buffer(message.place, buffers)
    return message, data, exchange.recv(data, message.peer)


def _buffer(like: Tensor, buffers: deque[Tensor]) -> Tensor:
    """Return a used buffer if it is large enough, else a new one; a smaller one is dropped."""
    used = buffers.popleft() if buffers else None
    return (
        torch.empty_like(like)
        if used is None or used.numel() < like.numel()
        else used[: like.numel()]
    )


def wait_for(handles: Iterable[Handle]) -> None:
    for handle in handles:
        handle.wait()


# Over Gloo

_KINDS: dict[Combine, Any] = {combine: kind for kind, combine in FOLD.items()}


class GlooLink:
    """Creates the exchange of each operation over a transport.

    All ranks must begin their operations in the same order, as with every collective. `transport`
    is a `GlooTransport`, or another one whose `send`, `recv` and `all_reduce` never decline.
    """

    def __init__(self, transport: Transport, rank: int, size: int) -> None:
        self.transport = transport
        self.rank = rank
        self.size = size
        self._count = itertools.count()

    def operation(self) -> "GlooExchange":
        return GlooExchange(self, FIRST_TAG + next(self._count) % NUM_TAGS)


class GlooExchange:
    """The messages of one operation over Gloo."""

    def __init__(self, link: GlooLink, tag: int) -> None:
        self.rank, self.size = link.rank, link.size
        self._transport, self._tag = link.transport, tag

    def send(self, tensor: Tensor, peer: int) -> Handle:
        return _taken(self._transport.send(tensor, peer, self._tag))

    def recv(self, tensor: Tensor, peer: int) -> Handle:
        return _taken(self._transport.recv(tensor, peer, self._tag))

    def all_reduce(self, flat: Tensor, combine: Combine) -> Handle:
        kind = _KINDS.get(combine)
        if kind is None:
            raise CommError(
                f"Gloo has no reduction like {combine!r}: choose another algorithm", op="all_reduce"
            )
        opts = AllreduceOptions()
        opts.reduceOp = kind
        return _taken(self._transport.all_reduce(flat, opts))


def _taken(work: Work | None) -> Handle:
    assert work is not None, "the transport of a link must not decline an operation"
    return work
