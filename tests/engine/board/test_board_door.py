"""The way to rank 0's board: strangers that send nothing, forged ranks, a forged rank 0."""

import json
import socket
import threading
from contextlib import ExitStack
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from allstep.comm.health import sockets
from allstep.engine.board import socket_board
from allstep.engine.board.socket_board import SocketBoard, connect
from allstep.errors import CommError
from allstep.limits import read_limits
from allstep.wire.frames import pack, receive, receive_frame, unpack
from allstep.wire.handshake import introduce

LIMITS = read_limits({})


def card_of(store: HashStore) -> dict:
    store.wait(["board"], timedelta(seconds=30))
    return json.loads(store.get("board"))


class Ranks:
    """Ranks 0 and others as threads; `boards` once they have met."""

    def __init__(self, store: HashStore, size: int, start: float = 30.0) -> None:
        self.store, self.size, self.start = store, size, start
        self.boards: dict[int, SocketBoard] = {}
        self.errors: dict[int, Exception] = {}
        self.threads: list[threading.Thread] = []

    def begin(self, rank: int) -> None:
        thread = threading.Thread(target=self.join, args=(rank,))
        thread.start()
        self.threads.append(thread)

    def join(self, rank: int) -> None:
        try:
            self.boards[rank] = connect(
                self.store, rank, self.size, LIMITS._replace(start=self.start), {}
            )
        except Exception as error:
            self.errors[rank] = error

    def end(self) -> None:
        for thread in self.threads:
            thread.join(100)
        for board in self.boards.values():
            board.close()


def test_silent_strangers_delay_no_rank() -> None:
    """One after the other, with a limit of 3 s each, 20 of them took longer than the ranks have."""
    ranks = Ranks(HashStore(), 3, start=20.0)
    ranks.begin(0)
    port = card_of(ranks.store)["port"]
    with ExitStack() as stack:
        for number in range(20):
            stranger = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=30)
            )
            stranger.sendall(b"\0\0\0\x30half"[:number])
        ranks.begin(1)
        ranks.begin(2)
        ranks.end()
    assert ranks.errors == {}
    assert sorted(ranks.boards) == [0, 1, 2]


@pytest.mark.parametrize(
    "who", [b"0", b"2", b"-1", b"one", b"", b"1" * 60], ids=lambda who: who.decode()[:4]
)
def test_a_rank_that_cannot_be_is_refused(who: bytes) -> None:
    """It knows the token; rank 1 has to come all the same."""
    ranks = Ranks(HashStore(), 2)
    ranks.begin(0)
    card = card_of(ranks.store)
    with socket.create_connection(("127.0.0.1", card["port"]), timeout=30) as sock:
        try:
            introduce(sock, card["token"], 30, who)
            assert sock.recv(1) == b""
        except OSError:  # closed before it was let in
            pass
    ranks.begin(1)
    ranks.end()
    assert ranks.errors == {}


def test_a_rank_that_connects_again_is_the_same_rank() -> None:
    """It may have given up waiting for an answer that was under way."""
    ranks = Ranks(HashStore(), 3)
    ranks.begin(0)
    card = card_of(ranks.store)
    first = socket_board._introduce("127.0.0.1", card["port"], card["token"], 1)
    ranks.begin(1)
    first.settimeout(30)
    assert first.recv(1) == b""
    first.close()
    ranks.begin(2)
    ranks.end()
    assert ranks.errors == {}
    assert sorted(ranks.boards) == [0, 1, 2]


def test_ranks_that_do_not_come_are_named_also_with_a_stranger_at_the_door() -> None:
    ranks = Ranks(HashStore(), 3, start=1.5)
    ranks.begin(0)
    port = card_of(ranks.store)["port"]
    with socket.create_connection(("127.0.0.1", port), timeout=30):
        ranks.begin(2)
        ranks.end()
    assert isinstance(ranks.errors[0], CommError)
    assert "ranks [1] did not connect to rank 0 within 2 s" in str(ranks.errors[0])


@pytest.mark.usefixtures("processes")
def test_a_forged_rank_0_is_not_believed() -> None:
    """It reflects the proof that it gets."""
    store, tried = HashStore(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        card = {"addresses": ["127.0.0.1"], "port": listener.getsockname()[1], "token": "secret"}
        store.set("board", json.dumps(card))

        def pretend() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(30)
                sock.sendall(b"n" * 32)
                *_, proof = unpack(receive_frame(sock))
                sock.sendall(pack([b"ok", proof]))
                tried.set()
                with pytest.raises(ConnectionError):
                    receive(sock, 1)
            listener.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        ranks = Ranks(store, 2, start=2.0)
        ranks.begin(1)
        ranks.end()
        thread.join(30)
    assert tried.is_set()
    assert "rank 1 did not reach rank 0" in str(ranks.errors[1])


def test_a_limit_of_a_year_passes_through_the_sockets_options() -> None:
    year = 365 * 24 * 3600.0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), timeout=30)
        far, _ = listener.accept()
        boards = [SocketBoard(0, 2, {1: near}, year), SocketBoard(1, 2, {0: far}, year)]
        sockets._probe(near, year)
        boards[1].post(b"\0\0\0\x02hi")
        boards[0].wait(30)
        boards[0].look()
        assert boards[0].posts() == [(1, b"hi")]
        for board in boards:
            board.close()
