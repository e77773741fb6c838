"""The launcher's small key-value store: how ranks find and inform each other.

It runs in the launcher, so any rank may die, rank 0 included. It holds a few kilobytes: addresses,
which ranks have joined, why a run failed; gradients never pass through it. There is no pickle and
no torch in it: keys are text, values are bytes.

On the wire a message is a frame of fields::

    frame = length (4 bytes, network order) | field | field ...        length counts everything
    behind itself field = length (4 bytes)                | bytes

A connection starts with a handshake of one round trip in which both sides prove that they know the
token, without sending it (`handshake`): the server sends a nonce, the client a nonce and its proof
over both, the server its proof. The client sends no request to a server that has not proved the
token, so a forged store gets none. A stranger that connects gets nothing but a nonce: it is closed
after 5 s, or sooner when more than 64 are open (`strangers`). What is closed for that reason gets
a frame "busy", so that a genuine client that was slow connects again.
Then requests and replies alternate::

    request = operation | argument ...
    reply   = "ok" | value ...    or    "late" | the missing keys    or    "bad" | the reason

A `get` or `wait` for a key that is not there is parked in the server until the key is set or its
time is over: no client polls (`parked`). One client is one process; each of its threads has a
connection of its own, so that a thread that waits delays no other.

A rank that goes wrong can neither fill nor starve the store: values, replies and what is under way
are bounded (`table`, `server`), each connection gets one request served per turn, and no request
ends the thread.
"""

from allstep.wire.client import Client, KeysLate
from allstep.wire.frames import format_addresses, new_token, parse_addresses
from allstep.wire.server import Server

__all__ = ["Client", "KeysLate", "Server", "format_addresses", "new_token", "parse_addresses"]
