"""One rank's way across the hosts: the ranks of the same local number, one on each host, and how
they sum a slice.

The algorithm is the one that the user names, or the cheapest by its formula on the link as it was
measured. Measuring takes some tens of milliseconds and is done with the first sum, on all lanes at
the same moment: so each finds the share of the wire that it will have.
"""

from collections.abc import Callable

from torch import Tensor

from allstep.comm.health.helper_thread import call_in_thread
from allstep.comm.network.algorithms import Algorithm, GlooLink, Speed, choose, measure_speed
from allstep.comm.network.algorithms.exchange import Combine
from allstep.comm.network.gloo import GlooTransport


class Lane:
    """A Gloo group of one rank per host. wanted:

    None for automatic. check: raises when the whole group has failed.
    """

    def __init__(
        self, transport: GlooTransport, wanted: Algorithm | None, check: Callable[[], None]
    ) -> None:
        self.transport = transport
        self._check = check
        self.size = transport.size
        self._link = GlooLink(transport, transport.rank, transport.size)
        self._wanted = wanted
        self.speed: Speed | None = None  # as measured, once it was needed
        self._chosen: dict[int, Algorithm] = {}

    def get_ready(self) -> None:
        """Before each sum, on all ranks of all lanes at once: measures the link the first time."""
        if self.speed is None and self._wanted is None:
            self.speed = call_in_thread(lambda: measure_speed(self._link.operation()), self._check)

    def all_reduce(self, flat: Tensor, combine: Combine) -> None:
        """Over all hosts, in place. `flat` is contiguous, one-dimensional and not empty."""
        algorithm = self.algorithm_for(flat.numel() * flat.element_size())
        call_in_thread(lambda: algorithm.run(self._link.operation(), flat, combine), self._check)

    def algorithm_for(self, nbytes: int) -> Algorithm:
        """Which one carries so many bytes; to be asked when the lane is ready."""
        if self._wanted is not None:
            return self._wanted
        if nbytes not in self._chosen:
            assert self.speed is not None
            self._chosen[nbytes] = choose(self.size, nbytes, self.speed)
        return self._chosen[nbytes]
