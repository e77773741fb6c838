"""The handshake: both sides of a connection prove that they know the token, without sending it.

::

    server -> client    Ns                                              32 random bytes
    client -> server    frame: Nc | who | mode | proof("client")        Nc: 32 random bytes
    server -> client    frame: "ok" | mode | proof("server", mode)
                        or "refused" | reason | proof("refused", reason), or "busy"

    proof(label, more) = HMAC-SHA256(token, label | port | Ns | Nc | who | mode | more)

Purpose of each part:

* Ns and Nc are new for each connection, so a recorded proof is useless later (replay).
* The labels differ, so a proof cannot be sent back to the side that made it (reflection).
* The port is the one that the client connected to and that the server listens on. A process that
  pretends to be the store on another port cannot forward the proofs to the real one (relay).
* `who` is the identity that the client states: its rank at the engine's board, its ticket at the
  store of an elastic run (`tickets`), else empty. A server with tickets refuses a client without a
  valid one, with a reason that the client can check.
* `mode` is "signed" or "plain": whether later frames are signed (`signatures`). The server's mode
  counts. It is "signed" if one side wants it, and a client that wants it accepts nothing else. The
  store's sides want it unless the other one has a loopback address: only root of this host could
  change frames there.

The handshake takes one round trip. The client sends no request before it has checked the server's
proof. Later messages are not encrypted: a host on the path between two others can read them.

The server's side (`Challenge`) uses no socket, because a server must not block on one client.
"""

import hmac
import secrets
import socket
import time
from dataclasses import dataclass

from allstep.wire.frames import BUSY, pack, receive, receive_frame, unpack
from allstep.wire.signatures import Signature, Signatures
from allstep.wire.tickets import Proofs, TicketRefused, Tickets, claim

NUM_NONCE_BYTES = 32
# Upper limit of the client's frame: four fields with their lengths, and the longest `who`.
MAX_HELLO_BYTES = 256
# Upper limit of the server's frame: a refusal has a reason.
_MAX_REPLY_BYTES = 1024
_OK, _REFUSED = b"ok", b"refused"
_CLIENT, _SERVER = b"client", b"server"
SIGNED, PLAIN = b"signed", b"plain"


class WrongToken(PermissionError):
    """The peer does not know our token, or does not accept it."""


class Busy(ConnectionError):
    """The server closed the connection before the end of the handshake: connect again."""


@dataclass(frozen=True)
class Admitted:
    """A client that has proved the token.

    who: the identity that it states. worker: the name of its ticket, "" at a server without
    tickets. reply: the frame to send to it. signatures: of later frames; None if they are plain.
    """

    who: bytes
    worker: str
    reply: bytes
    signatures: Signatures | None


class Challenge:
    """The server's side of one handshake.

    Args:
        token: the secret that both sides know.
        port: the port on which this server listens.
        tickets: the tickets that it has issued; None to admit every client with the token.
        signs: sign later frames also if the client does not want that.
    """

    def __init__(
        self, token: str, port: int, tickets: Tickets | None = None, *, signs: bool = False
    ) -> None:
        self._token = token
        self._port = port
        self._tickets = tickets
        self._signs = signs
        self.nonce = secrets.token_bytes(NUM_NONCE_BYTES)

    def check(self, hello: bytes) -> Admitted:
        """Check the client's frame.

        Raises WrongToken for a wrong proof, TicketRefused (with `reply`) for a wrong ticket.
        """
        fields = unpack(hello)
        if len(fields) != 4 or len(fields[0]) != NUM_NONCE_BYTES:
            raise WrongToken(f"{len(fields)} fields; expected a nonce, a name, a mode and a proof")
        nonce, who, wanted, found = fields
        proofs = Proofs(self._token, self._port, self.nonce, nonce)
        if not hmac.compare_digest(found, proofs.make(_CLIENT, who, wanted)):
            raise WrongToken("the client's proof is wrong")
        ticket = ""
        if self._tickets is not None:
            try:
                ticket = self._tickets.admit(who, proofs)
            except TicketRefused as refused:
                reason = str(refused).encode()
                proof = proofs.make(_REFUSED, who, wanted, reason)
                refused.reply = pack([_REFUSED, reason, proof])
                raise
        mode = SIGNED if self._signs or wanted == SIGNED else PLAIN
        reply = pack([_OK, mode, proofs.make(_SERVER, who, wanted, mode)])
        signatures = None
        if mode == SIGNED:
            client, server = _signatures(proofs, who, ticket)
            signatures = Signatures(sent=server, received=client)
        return Admitted(who, Tickets.name_of(ticket), reply, signatures)


def introduce(
    sock: socket.socket,
    token: str,
    seconds: float,
    who: bytes = b"",
    *,
    ticket: str = "",
    signs: bool = False,
) -> Signatures | None:
    """Run the client's side on a connected socket; return once the server has proved the token.

    Returns the signatures of later frames; None if they are plain. `who` is the identity to state,
    unless there is a `ticket`. `signs`: accept only a connection with signed frames. Raises
    WrongToken if the server has not proved the token, TicketRefused if it refuses the ticket, Busy
    if it asks to connect again, OSError if the connection ends or `seconds` have passed. Changes
    the socket's timeout.
    """
    end = time.monotonic() + seconds
    server_nonce = receive(sock, NUM_NONCE_BYTES, end)
    nonce = secrets.token_bytes(NUM_NONCE_BYTES)
    proofs = Proofs(token, sock.getpeername()[1], server_nonce, nonce)
    who = claim(ticket, proofs) if ticket else who
    wanted = SIGNED if signs else PLAIN
    sock.sendall(pack([nonce, who, wanted, proofs.make(_CLIENT, who, wanted)]))
    try:
        reply = receive_frame(sock, _MAX_REPLY_BYTES, end)
    except TimeoutError:
        raise
    except ConnectionError as error:
        raise WrongToken("it does not accept our token") from error
    if reply == pack([BUSY])[4:]:
        raise Busy("it closed the connection to make room for another one")
    mode = _checked_mode(reply, proofs, who, wanted)
    if mode == PLAIN:
        return None
    client, server = _signatures(proofs, who, ticket)
    return Signatures(sent=client, received=server)


def _checked_mode(reply: bytes, proofs: Proofs, who: bytes, wanted: bytes) -> bytes:
    """Return the mode in the server's reply; raise what `introduce` raises for another reply."""
    try:
        status, text, proof = unpack(reply)
    except ValueError:
        status = text = proof = b""
    label = {_OK: _SERVER, _REFUSED: _REFUSED}.get(status, b"")
    expected = proofs.make(label, who, wanted, text)
    if not label or not hmac.compare_digest(proof, expected):
        raise WrongToken("it does not know our token")
    if status == _REFUSED:
        raise TicketRefused(text.decode())
    if wanted == SIGNED and text != SIGNED:
        raise WrongToken("it does not sign its frames")
    return text


def _signatures(proofs: Proofs, who: bytes, ticket: str) -> tuple[Signature, Signature]:
    """Return the signatures of the client's and of the server's frames."""
    parts = who, ticket.encode()
    return (
        Signature(proofs.make(b"frames of the client", *parts)),
        Signature(proofs.make(b"frames of the server", *parts)),
    )
