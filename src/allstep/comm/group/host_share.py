"""What a rank takes of its host when the ranks have joined: a share of the cores, an interface."""

import os
from collections import Counter
from typing import Any

import torch

from allstep import machine
from allstep.world import World


def nodes_of(cards: list[dict[str, Any]]) -> list[str]:
    """Return the host of each rank.

    Ranks of one machine to which the launcher gave different host names, or the same local rank,
    are on different hosts for the launcher (hosts simulated on one machine), and its view counts.
    """
    seen: Counter[tuple[str, str, int]] = Counter()
    nodes = []
    for card in cards:
        place = (card["node"], card["host"], card["local_rank"])
        nodes.append(f"{card['node']} {card['host']} #{seen[place]}")
        seen[place] += 1
    return nodes


def take_cores(world: World, cards: list[dict[str, Any]]) -> None:
    """Set the number of threads to our share of the host's cores, unless the user set a number."""
    if _user_set_threads(world):
        return
    nodes = nodes_of(cards)
    masks = [
        card["cores"] for card, node in zip(cards, nodes, strict=True) if node == nodes[world.rank]
    ]
    torch.set_num_threads(
        machine.fair_share(cards[world.rank]["cores"], masks, machine.cpu_quota())
    )


def _user_set_threads(world: World) -> bool:
    """Return whether the user set OMP_NUM_THREADS.

    `allstep run` marks its own value; torchrun's own is 1.
    """
    value = machine.threads_by_user(os.environ)
    return value is not None and not (world.launcher == "torchrun" and value == "1")


def choose_interface(world: World, cards: list[dict[str, Any]]) -> dict[str, str]:
    """Set the variables that name the network interface to the other hosts for Gloo and NCCL.

    Return those that were not set before. Without them, a host name that resolves to 127.0.1.1, as
    it often does, would mislead both.
    """
    # Hosts that are simulated on this machine are reached by loopback too.
    others = [card for card in cards if card["node"] != cards[world.rank]["node"]]
    addresses = [
        *(address for card in others for address in card["addresses"][:1]),
        *cards[world.rank]["addresses"][1:],
    ]
    interface: str | None = "lo"
    if others:
        source = next(
            (source for address in addresses if (source := machine.route_to(address))), None
        )
        interface = machine.interface_of(source) if source else None
    if not interface:
        return {}
    names = (
        ["GLOO_SOCKET_IFNAME"]
        if interface == "lo"
        else ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    )
    chosen = {name: interface for name in names if name not in os.environ}
    os.environ.update(chosen)
    return chosen
