"""The end of an engine, which stops on all ranks together.

When one rank shuts down, fails or is lost, rank 0 sends a stop message to all ranks. A rank that
loses rank 0 stops by itself. Pending and later requests end with an error. Callers that wait on
the engine's process groups, such as an optimizer, are released as well: `abort_groups` aborts the
groups, after a grace period if the stop was orderly.
"""

import contextlib
import time

from allstep.engine.board.board import Board
from allstep.engine.engine_state import EngineState
from allstep.engine.executor import Executor
from allstep.engine.messages import pack
from allstep.engine.pending import PendingRequests
from allstep.engine.request import EngineStopped
from allstep.engine.stop_reasons import as_comm_error, stop_message
from allstep.errors import CommError

SHUT_DOWN = "Horovod has been shut down"
# Seconds for operations in flight when another rank shuts down.
_GRACE = 2.0


class Stop:
    """Stops this rank's engine, and requests the stop of the other ranks."""

    def __init__(
        self, state: EngineState, requests: PendingRequests, board: Board, executor: Executor
    ) -> None:
        self._state, self._requests, self._board, self._executor = state, requests, board, executor
        self._has_aborted = False

    def stop(self, error: CommError) -> None:
        """Stop this rank's engine; a no-op if it has stopped. `error`: raised in all callers."""
        if self._requests.close(error):
            self._state.hooks.stopped()

    def fail(self, error: BaseException) -> None:
        """Stop the engines of all ranks because of an error on this rank."""
        if self._requests.end is None:
            known = as_comm_error(error, self._state.world.rank)
            # The reason comes first: `stop` releases our callers, which may leave the groups and
            # end the process. Rank 0 may be lost.
            with contextlib.suppress(Exception):
                self._board.post(pack(stop_message(known)))
            if not isinstance(known, EngineStopped):
                self._abort(known)
            self.stop(known)
            self.abort_groups()

    def abort_groups(self) -> None:
        """Abort our groups once the engine has stopped; a no-op while it runs.

        After an orderly stop, operations in flight have `_GRACE` seconds: call it again later.
        """
        end = self._requests.end
        grace = _GRACE if isinstance(end, EngineStopped) else 0.0
        seconds = time.monotonic() - self._requests.ended_at
        if end is not None and seconds >= grace:
            self._abort(end)

    def _abort(self, end: CommError) -> None:
        if not self._has_aborted:
            self._has_aborted = True
            self._executor.abort(str(end), end.peer)


def shut_down_by(rank: int) -> EngineStopped:
    """Return the error for the other ranks when this rank shuts down."""
    text = f"{SHUT_DOWN} by rank {rank}; see its output if that was not intended"
    return EngineStopped(text, rank=rank, peer=rank)
