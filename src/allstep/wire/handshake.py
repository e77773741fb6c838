"""The handshake: both sides of a connection prove that they know the token, without sending it.

::

    server -> client    Ns                                              32 random bytes
    client -> server    frame: Nc | who | proof("client")               Nc: 32 random bytes
    server -> client    frame: "ok" | proof("server")                   or the frame "busy"

    proof(label) = HMAC-SHA256(token, label | port | Ns | Nc | who)

Purpose of each part:

* Ns and Nc are new for each connection, so a recorded proof is useless later (replay).
* The labels differ, so a proof cannot be sent back to the side that made it (reflection).
* The port is the one that the client connected to and that the server listens on. A process that
  pretends to be the store on another port cannot forward the proofs to the real one (relay).
* `who` is the identity that the client states: its rank at the engine's board, empty at the store.

The handshake takes one round trip. The client sends no request before it has checked the server's
proof. Later messages are neither encrypted nor signed: a host on the path between two others can
still read and change them.

The server's side (`Challenge`) uses no socket, because a server must not block on one client.
"""

import hmac
import secrets
import socket
import time

from allstep.wire.frames import BUSY, pack, receive, receive_frame, unpack

NUM_NONCE_BYTES = 32
# Upper limit of the client's frame: three fields with their lengths, and the longest `who`.
MAX_HELLO_BYTES = 128
_OK = b"ok"
_CLIENT, _SERVER = b"client", b"server"


class WrongToken(PermissionError):
    """The peer does not know our token, or does not accept it."""


class Busy(ConnectionError):
    """The server closed the connection before the end of the handshake: connect again."""


class Challenge:
    """The server's side of one handshake.

    Args:
        token: the secret that both sides know.
        port: the port on which this server listens.
    """

    def __init__(self, token: str, port: int) -> None:
        self._token = token
        self._port = port
        self.nonce = secrets.token_bytes(NUM_NONCE_BYTES)

    def check(self, hello: bytes) -> tuple[bytes, bytes]:
        """Check the client's frame; return `who` and the reply. WrongToken for a wrong proof."""
        fields = unpack(hello)
        if len(fields) != 3 or len(fields[0]) != NUM_NONCE_BYTES:
            raise WrongToken(f"{len(fields)} fields; expected a nonce, a name and a proof")
        nonce, who, found = fields
        parts = (self._token, self._port, self.nonce, nonce, who)
        if not hmac.compare_digest(found, _proof(_CLIENT, *parts)):
            raise WrongToken("the client's proof is wrong")
        return who, pack([_OK, _proof(_SERVER, *parts)])


def introduce(sock: socket.socket, token: str, seconds: float, who: bytes = b"") -> None:
    """Run the client's side on a connected socket; return once the server has proved the token.

    `who` is the identity to state. Raises WrongToken if the server has not proved the token, Busy
    if it asks to connect again, OSError if the connection ends or `seconds` have passed. Changes
    the socket's timeout.
    """
    end = time.monotonic() + seconds
    server_nonce = receive(sock, NUM_NONCE_BYTES, end)
    parts = (token, sock.getpeername()[1], server_nonce, secrets.token_bytes(NUM_NONCE_BYTES), who)
    sock.sendall(pack([parts[3], who, _proof(_CLIENT, *parts)]))
    try:
        reply = receive_frame(sock, MAX_HELLO_BYTES, end)
    except TimeoutError:
        raise
    except ConnectionError as error:
        raise WrongToken("it does not accept our token") from error
    if reply == pack([BUSY])[4:]:
        raise Busy("it closed the connection to make room for another one")
    if not hmac.compare_digest(reply, pack([_OK, _proof(_SERVER, *parts)])[4:]):
        raise WrongToken("it does not know our token")


def _proof(label: bytes, token: str, port: int, *parts: bytes) -> bytes:
    """Return the HMAC of the module's docstring, over the label, the port and `parts`."""
    # A frame gives each part its length, so that no two lists of parts have the same bytes.
    message = pack([label, b"%d" % port, *parts])
    return hmac.digest(token.encode(), message, "sha256")
