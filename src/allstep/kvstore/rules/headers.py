"""Headers of the messages between workers and servers: eight int64 numbers, then the payload.

    | magic | kind | part | a | b | c | status | bytes of the payload |

Every request has one header and at most one payload. `ANSWERED` requests get one answer, of the
same form and in the order of requests; the others get none, so a push costs one way.

===========  ========================================================  ========================
request      payload, numbers                                          answer
===========  ========================================================  ========================
init         JSON: key, dtype, shape, first element, width of rows     -
value        the value of a new part                                   -
push         a gradient (the sum of a host, in mode sync)              -
pull         a: the round that the value must contain (mode sync); c:  the value; a: version;
             WHOLE, FIRST or DIFFERENCE                                c: what to do with it
pushpull     a gradient, and as for a pull                             as of a pull
push_rows    a: number of rows; their numbers, int64, and elements     -
pull_rows    int64 numbers of rows; a: the round                       their elements; a: version
codecs       the text of `rules.codecs`                                -
offer        JSON: copies of parts whose server is lost                JSON: which of them to send
take         such a copy                                               -
optimizer    JSON: class and settings                                  -
state        -                                                         JSON: names and forms
state_value  a: which entry of `state`                                 the value of the entry
put_state    a: which entry; the value of the entry                    -
collect      JSON: what all parties call, and a text; a: needs all;    JSON: the texts
             b: the number of the call
drop         -                                                         -  (forget all parts)
check        -                                                         -  (answered without text)
why          -                                                         text of the last error
rest         -                                                         -  (pushes nothing for now)
wake         -                                                         JSON: parts whose gradient
                                                                       is too old now
bye          -                                                         -  (end of the link)
===========  ========================================================  ========================

An answer to a data request has the size that was asked for also after an error, with `FAILED` as
its status; `why` then returns the text. So a worker can wait for many answers at once.
"""

from enum import IntEnum
from typing import NamedTuple

_MAGIC = 0x616C6C6B76
LENGTH = 8
"""Numbers of a header."""

WHOLE, FIRST, DIFFERENCE = 0, 1, 2
"""What a pull asks for: the value; the same, and to remember that this party holds it; what has
changed since then, encoded."""
ADDS, REPLACES, NOT_FINITE = 0, 1, 2
"""What a difference means: add it; take it as the value; the value is not finite."""

MAX_PAYLOAD = 1 << 40
OK, FAILED = 0, 1
"""Status of an answer."""


class Kind(IntEnum):
    """What a message asks for, or that it answers."""

    ANSWER = 0
    INIT = 1
    VALUE = 2
    PUSH = 3
    PULL = 4
    PUSHPULL = 5
    OPTIMIZER = 6
    STATE = 7
    STATE_VALUE = 8
    PUT_STATE = 9
    COLLECT = 10
    DROP = 11
    WHY = 12
    CHECK = 13
    REST = 14
    WAKE = 15
    BYE = 16
    CODECS = 17
    OFFER = 20
    TAKE = 21
    PUSH_ROWS = 18
    PULL_ROWS = 19


ANSWERED = frozenset(
    (
        Kind.PULL,
        Kind.PULL_ROWS,
        Kind.PUSHPULL,
        Kind.STATE,
        Kind.STATE_VALUE,
        Kind.COLLECT,
        Kind.WHY,
        Kind.CHECK,
        Kind.WAKE,
        Kind.OFFER,
    )
)


class BadHeader(ValueError):
    """Numbers that are no header: the other side is not a part of this run, or of another one."""


class Header(NamedTuple):
    """One header; the meaning of part, a, b and c depends on the kind."""

    kind: Kind
    part: int = 0
    a: int = 0
    b: int = 0
    c: int = 0
    status: int = OK
    nbytes: int = 0

    def numbers(self) -> list[int]:
        """Return it as it is sent."""
        return [
            _MAGIC, int(self.kind), self.part, self.a, self.b, self.c, self.status, self.nbytes
        ]  # fmt: skip


def read_header(numbers: list[int]) -> Header:
    """Return the header that was received; BadHeader if it is none."""
    if len(numbers) != LENGTH or numbers[0] != _MAGIC:
        raise BadHeader(f"found {numbers[:2]}, expected a header that begins with {_MAGIC}")
    _, kind, part, a, b, c, status, nbytes = numbers
    if kind not in Kind.__members__.values():
        raise BadHeader(f"unknown kind of message {kind}; expected 0 to {max(Kind)}")
    if not 0 <= nbytes <= MAX_PAYLOAD or part < 0 or status not in (OK, FAILED):
        raise BadHeader(f"kind {kind} with part {part}, status {status} and {nbytes} bytes")
    return Header(Kind(kind), part, a, b, c, status, nbytes)
