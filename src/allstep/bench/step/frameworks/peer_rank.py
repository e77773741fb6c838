"""One rank of a peer of `allstep bench step --framework`: trains on requests of the bench.

    python -m allstep.bench.step.frameworks.peer_rank FRAMEWORK MODEL BATCH PORTS SOCKET

It is started by `allstep run`, for the same share of the cores, and uses nothing of allstep while
it trains; the ranks begin a turn together, by a collective of the peer. PORTS are free ports of
127.0.0.1, one per rank.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allstep.bench.step.frameworks.rank import FrameworkRank
from allstep.bench.step.frameworks.tasks import DATA_PARALLEL, MIRRORED, framework_of, task_of

if TYPE_CHECKING:
    from allstep.bench.step.frameworks.trainee import Peer

_MODULES = {MIRRORED: "mirrored_peer", DATA_PARALLEL: "data_parallel_peer"}


@dataclass(frozen=True)
class Place:
    """The place of a rank among its peers."""

    rank: int
    size: int
    ports: tuple[int, ...]


@contextmanager
def _not_watched(parts: dict[str, float]) -> Iterator[None]:
    yield


def main(framework: str, model: str, batch: str, ports: str, path: str) -> None:
    """Serve the bench as one rank of a peer."""
    name = framework_of(framework).peer
    os.environ["KERAS_BACKEND"] = framework_of(framework).backend
    numbers = tuple(map(int, ports.split(",")))
    place = Place(int(os.environ["ALLSTEP_RANK"]), len(numbers), numbers)
    module = importlib.import_module(f"allstep.bench.step.frameworks.{_MODULES[name]}")
    peer: Peer = module.start(model, place)

    from allstep.bench.comm.rank import serve
    from allstep.bench.step.frameworks.trainee import make_batches

    batches = make_batches(task_of(framework, model), int(batch), place.rank)
    # A rank that begins early would count its wait for the others as the peer's time.
    contenders = {name: peer.make}
    serve(
        path,
        FrameworkRank((place.rank, place.size), contenders, batches, peer.meet, _not_watched),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
