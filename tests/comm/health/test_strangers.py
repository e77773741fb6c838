"""Connections of strangers to the ports of a group that has formed."""

import os
import socket

import pytest
import torch
import torch.distributed as dist

import allstep
from allstep.comm.health.listeners import close_to_strangers
from support.ranks import Ranks


def listening() -> list[tuple[str, int]]:
    """Addresses of this process's listening TCP sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.append(sock.getsockname()[:2])
        except OSError:
            continue
    return found


def can_connect(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=0.5).close()
    except OSError:
        return False
    return True


def knock() -> tuple[int, int, float]:
    """Listening sockets, those that let a stranger in, and a sum over a later group."""
    own = socket.create_server(("127.0.0.1", 0))
    world = allstep.init()
    addresses = [address for address in listening() if address != own.getsockname()]
    open_ones = sum(map(can_connect, addresses))
    assert can_connect(own.getsockname())  # a socket of the user's stays open
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.all_reduce(total, group=dist.new_group(list(range(world.size))))
    return len(addresses), open_ones, total.item()


@pytest.mark.parametrize("env", [{}, {"ALLSTEP_ALGORITHM": "ring"}], ids=["shared memory", "ring"])
@pytest.mark.parametrize("size", [1, 3])
def test_nobody_gets_in_once_a_group_has_formed(
    ranks: Ranks, size: int, env: dict[str, str]
) -> None:
    for num_listening, num_open, total in ranks(size, knock, env=env):
        assert num_listening > 0, "Gloo listens no more: this test shows nothing"
        assert (num_open, total) == (0, float(size * size))


def test_other_sockets_are_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert close_to_strangers({server.fileno()}, []) == 0
        assert close_to_strangers({server.fileno()}, [server.fileno()]) == 0
        assert can_connect(server.getsockname())
