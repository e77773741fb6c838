"""The launcher's small key-value store: how ranks find and inform each other.

The store runs in the launcher, so it survives the end of any rank, rank 0 included. It holds a few
kilobytes: addresses, which ranks have joined, why a run failed. Gradients never pass through it. It
uses neither pickle nor torch: keys are text, values are bytes.

A message is a frame of fields::

    frame = length (4 bytes, network order) | field | field ...    length: bytes after itself
    field = length (4 bytes, network order) | bytes

A connection starts with a handshake of one round trip in which both sides prove that they know the
token, without sending it (`handshake`): the server sends a nonce, the client a nonce and its proof
over both, the server its proof. The client sends no request to a server that has not proved the
token, so a forged store receives none. A peer without the token receives nothing but a nonce: it is
closed after 5 s, or sooner when more than 64 unauthenticated connections are open
(`unauthenticated`). Before it is closed it receives a frame "busy", so that a genuine but slow
client connects again. In an elastic run a client also proves a ticket, which the launcher has
issued for one worker (`tickets`). Frames between hosts are signed (`signatures`).
After the handshake, requests and replies alternate::

    request = operation | argument ...
    reply   = "ok" | value ...    or    "late" | the missing keys    or    "bad" | the reason
              or "ended" | the value of the key that ended the wait

A `get` or `wait` for an absent key waits in the server until the key is set or the request times
out, so no client polls (`waiting`). A wait may name a key that ends it, such as the notice that a
world has ended: a rank that waits for a lost one then knows at once. One client is one process;
each of its threads has a connection of its own, so that a thread that waits delays no other thread.

A faulty rank can neither fill nor starve the store: values, replies and bytes in flight are bounded
(`table`, `server`), the server serves one request per connection in each iteration of its loop, and
no request can end the server's thread.
"""

from allstep.wire.client import Client, KeysLate, WaitEnded, find_address
from allstep.wire.frames import format_addresses, new_token, parse_addresses
from allstep.wire.server import Server
from allstep.wire.tickets import TicketRefused, Tickets

__all__ = [
    "Client",
    "KeysLate",
    "Server",
    "TicketRefused",
    "Tickets",
    "WaitEnded",
    "find_address",
    "format_addresses",
    "new_token",
    "parse_addresses",
]
