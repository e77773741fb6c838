"""The launcher's small key-value store: how ranks find each other and leave word for each other.

It lives in the launcher, so any rank may die, rank 0 included. It holds a few kilobytes: addresses, who has turned up, why a run
failed; gradients never pass through it. There is no pickle and no torch in it: keys are text, values are bytes.

On the wire a message is a frame of fields::

    frame = length (4 bytes, network order) | field | field ...        length counts everything behind itself
    field = length (4 bytes)                | bytes

A connection starts with a challenge: the server sends 32 random bytes, the client answers with HMAC-SHA256(token, challenge). The
token itself is never sent, and a stranger that connects gets nothing: it is closed after 5 s, or
sooner when more than 64 are open (`strangers`). What is closed for that reason gets a frame "busy",
so that a genuine client that was slow connects again.
Then requests and replies alternate::

    request = operation | argument ...          reply = "ok" | value ...     or     "late" | the keys that did not come

A `get` or `wait` for a key that is not there is parked in the server until somebody sets it or its time runs out: nobody polls.
One client is one process; each of its threads has a connection of its own, so that one that waits holds up no other.
"""

from allstep.wire.client import Client, KeysLate
from allstep.wire.frames import format_addresses, new_token, parse_addresses
from allstep.wire.server import Server

__all__ = ["Client", "KeysLate", "Server", "format_addresses", "new_token", "parse_addresses"]
