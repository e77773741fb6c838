"""The messages between ranks and the coordinator. A message is a list of fields; the first field is
its type.

    from a rank     ask <spec> [<spec> ...]      request one operation, or a group
                    notice <key> <number>        this rank begins step `number` of `key`; forwarded
                                                 to the ranks that have joined
                    stop <kind> <text> <peer>    stop all engines, with an error of this kind

    to all ranks    do <spec> <more> ...         run one operation, or several fused ones; `more`
                                                 is the rows or splits of each rank
                    refuse <set> <name> <kind> <text>
                                                 raise an error. Kinds: `mismatch` if the requests
                                                 of the ranks differ, `value` for a caller's error
                    joining                      a rank has joined: ranks send notices from now on
                    joined <rank>                all ranks have joined, this rank last
                    add <id> <ranks>             add a process set
                    remove <id>                  remove a process set
                    notice, stop                 as above

Packing and unpacking are cached, since most messages repeat in every step.
"""

from collections.abc import Sequence
from functools import lru_cache

from allstep.wire import frames

ASK, NOTICE, STOP = b"ask", b"notice", b"stop"
DO, REFUSE, JOINING, JOINED = b"do", b"refuse", b"joining", b"joined"
ADD, REMOVE = b"add", b"remove"
# Kinds of refusals.
MISMATCH, VALUE = b"mismatch", b"value"

Fields = Sequence[bytes]

# Bytes; longer messages are not cached.
_SHORT = 1024
_NUM_KEPT = 4096


def pack(fields: Fields) -> bytes:
    """Return the frame of a message, for a board."""
    return _packed(tuple(fields)) if len(fields) <= 4 else frames.pack(fields)


def unpack(message: bytes) -> Fields:
    """Return the fields of a message from a board."""
    return _unpacked(message) if len(message) <= _SHORT else frames.unpack(message)


_packed = lru_cache(_NUM_KEPT)(frames.pack)
_unpacked = lru_cache(_NUM_KEPT)(frames.unpack)
