"""Signed frames: what is changed, repeated, left out or moved between two hosts is refused.

Two loopback addresses stand for two hosts: a relay listens on 127.0.0.2 with the port of the store
on 127.0.0.1, as a host on the path would, and changes frames of either direction.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.wire import Client, Server, client, new_token
from allstep.wire.frames import LENGTH, MAX_FRAME, pack, receive, receive_frame, unpack
from allstep.wire.handshake import NUM_NONCE_BYTES, introduce
from allstep.wire.signatures import TAG_NBYTES, ForgedFrame, Signature

TOKEN = new_token()


# Pure: any change of a sequence of frames is noticed at the first frame that differs.

KINDS = ["change", "repeat", "leave out", "swap", "cut", "another key"]


@given(
    bodies=st.lists(st.binary(max_size=50), min_size=2, max_size=6, unique=True),
    kind=st.sampled_from(KINDS),
    data=st.data(),
)
def test_a_changed_sequence_is_noticed_at_its_first_wrong_frame(
    bodies: list[bytes], kind: str, data: st.DataObject
) -> None:
    sender, receiver = Signature(b"k" * 32), Signature(b"k" * 32)
    right = [sender.sign(pack([body]))[LENGTH.size :] for body in bodies]
    at = data.draw(st.integers(0, len(right) - 2))
    wrong = list(right)
    if kind == "change":
        place = data.draw(st.integers(0, len(wrong[at]) - 1))
        bit = 1 << data.draw(st.integers(0, 7))
        wrong[at] = wrong[at][:place] + bytes([wrong[at][place] ^ bit]) + wrong[at][place + 1 :]
    elif kind == "repeat":
        wrong.insert(at, wrong[at])
        at += 1
    elif kind == "leave out":
        del wrong[at]
    elif kind == "swap":
        wrong[at], wrong[at + 1] = wrong[at + 1], wrong[at]
    elif kind == "cut":
        wrong[at] = wrong[at][: data.draw(st.integers(0, len(wrong[at]) - 1))]
    else:
        wrong[at] = Signature(b"x" * 32).sign(pack([bodies[at]]))[LENGTH.size :]
    for body, found in zip(bodies, wrong[:at], strict=False):
        assert unpack(receiver.check(found)) == [body]
    with pytest.raises(ForgedFrame, match=f"frame {at} has a wrong signature"):
        receiver.check(wrong[at])


# A store and a client.


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients take the store for one of another host."""
    monkeypatch.setattr(client, "is_loopback", lambda _: False)


class Relay:
    """Passes frames on between a client and the store; `spoil` may change what it passes on.

    spoil: called with the direction ("up" to the store, "down") and the frame, returns the frames
    to pass on.
    """

    def __init__(self, port: int, spoil: Callable[[str, bytes], list[bytes]]) -> None:
        self.address = "127.0.0.2", port
        self.spoil, self.seen = spoil, bytearray()
        self.listener = socket.create_server(self.address)
        self.threads = [threading.Thread(target=self.serve)]
        self.threads[0].start()

    def serve(self) -> None:
        near, _ = self.listener.accept()
        far = socket.create_connection(("127.0.0.1", self.address[1]))
        near.sendall(receive(far, NUM_NONCE_BYTES))
        far.sendall(_frame(near))
        near.sendall(_frame(far))
        back = threading.Thread(target=self.pass_on, args=("down", far, near))
        back.start()
        self.pass_on("up", near, far)
        back.join()
        near.close()
        far.close()

    def pass_on(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while frame := _frame(source):
                self.seen += frame
                for each in self.spoil(direction, frame):
                    target.sendall(each)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.close()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


def _frame(sock: socket.socket) -> bytes:
    body = receive_frame(sock, MAX_FRAME + TAG_NBYTES)
    return LENGTH.pack(len(body)) + body


@contextmanager
def relayed(spoil: Callable[[str, bytes], list[bytes]]) -> Iterator[tuple[Server, Relay]]:
    with Server(TOKEN) as server:
        relay = Relay(server.port, spoil)
        try:
            yield server, relay
        finally:
            relay.close()


def test_an_honest_relay_passes_signed_frames(far: None) -> None:
    """What the next tests change is right otherwise."""
    with relayed(lambda _, frame: [frame]) as (_, relay):
        user = Client([relay.address], TOKEN, timeout=30)
        user.set("k", b"value")
        assert user.get("k", 30) == b"value"
        user.close()
        for plain in (pack([b"set", b"k", b"value"]), pack([b"ok"]), pack([b"ok", b"value"])):
            assert plain not in relay.seen
            assert plain[LENGTH.size :] in relay.seen


def test_the_largest_reply_is_signed_too(far: None) -> None:
    with Server(TOKEN) as server:
        user = Client([("127.0.0.1", server.port)], TOKEN, timeout=60)
        # The reply has the fields "ok" and the value.
        value = bytes(MAX_FRAME - len(pack([b"ok", b""])) + LENGTH.size)
        server.set("k", value)
        assert user.get("k", 60) == value
        user.close()


def flipped(frame: bytes) -> list[bytes]:
    return [frame[:-TAG_NBYTES] + bytes([frame[-TAG_NBYTES] ^ 1]) + frame[-TAG_NBYTES + 1 :]]


SPOILS: dict[str, Callable[[bytes], list[bytes]]] = {
    "a tag": flipped,
    "a length": lambda frame: [LENGTH.pack(len(frame) - 5) + frame[4:-1]],
    "a value": lambda frame: [frame.replace(b"v2", b"v9").replace(b"ok", b"no")],
    "no tag": lambda frame: [LENGTH.pack(len(frame) - 4 - TAG_NBYTES) + frame[4:-TAG_NBYTES]],
    "an empty frame": lambda frame: [LENGTH.pack(0)],
    "repeated": lambda frame: [frame, frame],
}


def set_both(user: Client) -> None:
    user.set("k", b"v2")
    user.set("k", b"v3")


@pytest.mark.parametrize("kind", SPOILS)
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_spoiled_frame_ends_the_connection_with_one_error(
    far: None, direction: str, kind: str
) -> None:
    """The second frame of a direction is spoiled."""
    counts = {"up": 0, "down": 0}

    def spoil(way: str, frame: bytes) -> list[bytes]:
        counts[way] += 1
        if way == direction and counts[way] == 2:
            return SPOILS[kind](frame)
        return [frame]

    with relayed(spoil) as (server, relay):
        user = Client([relay.address], TOKEN, timeout=30)
        user.set("k", b"v1")
        with pytest.raises(ConnectionError, match="the store at") as caught:
            set_both(user)
        assert "\n" not in str(caught.value)
        if direction == "down" and kind != "repeated":
            assert "signature" in str(caught.value)
        if kind == "repeated":
            # Noticed with the third request or its reply.
            assert server.peek("k") in (b"v2", b"v3")[: 1 if direction == "up" else 2]
        else:
            assert server.peek("k") == (b"v2" if direction == "down" else b"v1")
        assert server.failure is None


def raw(server: Server) -> tuple[socket.socket, Signature]:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    signatures = introduce(sock, TOKEN, 30, signs=True)
    assert signatures is not None
    return sock, signatures.sent


@pytest.mark.parametrize("order", [[0, 0, 1], [1, 0], [0, 2], [2]])
def test_repeated_moved_and_missing_requests_have_no_effect(order: list[int]) -> None:
    with Server(TOKEN) as server:
        sock, sent = raw(server)
        frames = [sent.sign(pack([b"append", b"k", b"%d" % number])) for number in range(3)]
        with sock:
            sock.sendall(b"".join(frames[number] for number in order))
            with suppress(OSError):
                while sock.recv(1000):
                    continue
        assert server.peek("k") == (b"0" if order[0] == 0 else None)


def test_frames_of_another_connection_are_refused() -> None:
    with Server(TOKEN) as server:
        (first, sent), (second, _) = raw(server), raw(server)
        with first, second:
            second.sendall(sent.sign(pack([b"set", b"k", b"v"])))
            with suppress(ConnectionResetError):
                assert second.recv(100) == b""
        assert server.peek("k") is None


def test_loopback_is_not_signed() -> None:
    with Server(TOKEN) as server:
        user = Client([("127.0.0.1", server.port)], TOKEN, timeout=30)
        assert user._local.signatures is None
        user.close()
