"""What ranks and the coordinator say to each other. A message is a list of fields, the first of
which says what it is.

    from a rank   ask <ask> [<ask> ...]     one operation, or a group
                  notice <key> <number>     "I begin step `number` of `key`": told to the ranks that
                  have joined stop <kind> <text> <peer> the engine shall end, with an error of this
                  kind
    to all ranks  do <ask> <more> ...       one operation, or several fused ones. more: rows of each
    rank, splits of each rank
                  refuse <set> <name> <kind> <text>     mismatch: the ranks differ; value: the
                  caller is wrong joining                   some rank has joined: who begins a step
                  gives notice from now on joined <rank>             all ranks have joined, this one
                  last add <id> <ranks>          a new process set remove <id> notice, stop
                  as above

What is said again and again is packed and unpacked once.
"""

from collections.abc import Sequence
from functools import lru_cache

from allstep.wire import frames

ASK, NOTICE, STOP = b"ask", b"notice", b"stop"
DO, REFUSE, JOINING, JOINED, ADD, REMOVE = (
    b"do",
    b"refuse",
    b"joining",
    b"joined",
    b"add",
    b"remove",
)
MISMATCH, VALUE = b"mismatch", b"value"  # kinds of refusals

Fields = Sequence[bytes]

_SHORT = 1024  # bytes; longer ones are not kept
_NUM_KEPT = 4096


def pack(fields: Fields) -> bytes:
    """A frame for a board."""
    return _packed(tuple(fields)) if len(fields) <= 4 else frames.pack(fields)


def unpack(message: bytes) -> Fields:
    """What came out of a board."""
    return _unpacked(message) if len(message) <= _SHORT else frames.unpack(message)


_packed = lru_cache(_NUM_KEPT)(frames.pack)
_unpacked = lru_cache(_NUM_KEPT)(frames.unpack)
