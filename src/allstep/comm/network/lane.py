"""The path of one rank to the other hosts: the ranks with its local rank, one on each host.

The ranks of a lane sum one slice. The algorithm is the one that the user names, or the one with the
lowest cost by its formula on the measured link. The measurement takes some tens of milliseconds and
is made with the first sum, on all lanes at the same time, so each lane measures the share of the
link that it will have.
"""

from collections.abc import Callable

from torch import Tensor

from allstep.comm.health.helper_thread import call_in_thread
from allstep.comm.network.algorithms import Algorithm, GlooLink, Speed, choose, measure_speed
from allstep.comm.network.algorithms.point_to_point import Combine
from allstep.comm.network.gloo import GlooTransport
from allstep.comm.network.owner_parts import Parts, from_owners, sum_for_owners


class Lane:
    """A Gloo group of one rank per host.

    `wanted` is the algorithm to use; None for automatic. `check` raises if the whole group has
    failed.
    """

    def __init__(
        self, transport: GlooTransport, wanted: Algorithm | None, check: Callable[[], None]
    ) -> None:
        self.transport = transport
        self._check = check
        self.size = transport.size
        self._link = GlooLink(transport, transport.rank, transport.size)
        self._wanted = wanted
        # Measured when first needed.
        self.speed: Speed | None = None
        self._chosen: dict[int, Algorithm] = {}

    def get_ready(self) -> None:
        """Measure the link the first time; called before each sum, on all ranks of all lanes."""
        if self.speed is None and self._wanted is None:
            self.speed = call_in_thread(lambda: measure_speed(self._link.operation()), self._check)

    def all_reduce(self, flat: Tensor, combine: Combine) -> None:
        """Sum over all hosts, in place. `flat` is contiguous, one-dimensional and not empty."""
        algorithm = self.algorithm_for(flat.numel() * flat.element_size())
        call_in_thread(lambda: algorithm.run(self._link.operation(), flat, combine), self._check)

    def sum_for_owners(self, parts: Parts, combine: Combine) -> None:
        """Sum the parts of all hosts, each for its owner; see `owner_parts`."""
        call_in_thread(lambda: sum_for_owners(self._link.operation(), parts, combine), self._check)

    def from_owners(self, parts: Parts) -> None:
        """Receive the parts that other hosts own, and send them ours."""
        call_in_thread(lambda: from_owners(self._link.operation(), parts), self._check)

    def algorithm_for(self, nbytes: int) -> Algorithm:
        """Return the algorithm for `nbytes` bytes; call `get_ready` before."""
        if self._wanted is not None:
            return self._wanted
        if nbytes not in self._chosen:
            assert self.speed is not None
            self._chosen[nbytes] = choose(self.size, nbytes, self.speed)
        return self._chosen[nbytes]
