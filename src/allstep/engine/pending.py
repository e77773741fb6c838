"""The unfinished requests of this rank, from `submit` to the result, each under its handle.

`submit` checks requests, gives them names and one handle, and posts them to the coordinator. A
request is then found by its key (process set and name) until `dispatch` removes it and puts the
result into its handle. A handle is found by its number until the caller synchronizes it.

After `close`, every pending request has ended with the given error, and `submit` raises the same
error. One lock covers both, so that no request is accepted and then lost.
"""

import threading
import time
from collections.abc import Sequence

from allstep.engine.board.board import Board
from allstep.engine.engine_state import EngineState
from allstep.engine.executor import Executor
from allstep.engine.handle import Handle, Pending
from allstep.engine.messages import ASK, pack
from allstep.engine.notices import Notices
from allstep.engine.request import (
    DuplicateName,
    Key,
    Kind,
    Request,
    check,
    encode,
    full_names,
)
from allstep.engine.stop_reasons import stop_message
from allstep.errors import CommError

# The key of a pending shutdown; no operation has this name.
_STOPPING: Key = (0, "")


class PendingRequests:
    """The requests that have not been synchronized.

    `handles`: by number. `by_key`: the operations without a result. `end`: why the engine has
    stopped; None while it runs. `ended_at`: when it stopped, on the monotonic clock.
    """

    def __init__(
        self, state: EngineState, board: Board, executor: Executor, notices: Notices
    ) -> None:
        self._state, self._board, self._executor, self._notices = state, board, executor, notices
        # Protects everything below.
        self._lock = threading.Lock()
        self._last_handle = 0
        self.handles: dict[int, Handle] = {}
        self.by_key: dict[Key, Pending] = {}
        self.end: CommError | None = None
        self.ended_at = 0.0

    def submit(self, requests: list[Request], is_group: bool, driving: bool = False) -> int:
        """Post requests to the coordinator and return the number of their handle. Never wait.

        `is_group`: whether the result is a tuple. `driving`: the caller drives next, so no thread
        is woken.
        """
        state = self._state
        with self._lock:
            self._last_handle = number = self._last_handle + 1
            self.check_end()
            for request in requests:
                self._check(request)
            names = full_names(requests, number)
            keys = [
                (request.process_set, name) for request, name in zip(requests, names, strict=True)
            ]
            self._check_names(keys)
            handle = self.handles[number] = Handle(len(requests), is_group)
            for index, (request, key) in enumerate(zip(requests, keys, strict=True)):
                self.by_key[key] = Pending(request, handle, index)
                state.hooks.submitted(key)
                if request.kind is Kind.JOIN:
                    state.has_joined = True
                    self._executor.device_of_zeros = request.device
                    # The coordinator needs our steps before our request to join.
                    self._notices.post_all()
            if not requests:
                return number
            frame = pack(
                [
                    ASK,
                    *(encode(request, name) for request, name in zip(requests, names, strict=True)),
                ]
            )
            self._board.post(frame, driving)
        return number

    def _check(self, request: Request) -> None:
        number, rank = request.process_set, self._state.world.rank
        members = self._state.process_sets.get(number)
        if members is None:
            raise ValueError(
                f"Invalid process set id {number}: the set does not exist, or has not been"
                " registered"
            )
        if rank not in members:
            raise ValueError(
                f"rank {rank} is not a member of process set {number} ({list(members)})"
            )
        check(request, rank, members)

    def _check_names(self, keys: Sequence[Key]) -> None:
        seen: set[Key] = set()
        for key in keys:
            if key in self.by_key or key in seen:
                raise DuplicateName(
                    f"{key[1]}: the tensor has the same name as another tensor that is being "
                    f"processed on rank {self._state.world.rank}. "
                    "Wait for that one (synchronize), or give this one another name"
                )
            seen.add(key)

    # The end

    def check_end(self) -> None:
        """Raise the reason for the stop if the engine has stopped.

        Each call raises a new error, so that none collects the tracebacks of all callers.
        """
        end = self.end
        if end is not None:
            raise type(end)(
                str(end),
                rank=end.rank,
                op=end.op,
                tensor=end.tensor,
                peer=end.peer,
                seconds=end.seconds,
            )

    def submit_stop(self, why: CommError) -> Handle:
        """Request a stop of all engines; return a handle that is done when ours has stopped.

        A no-op if the engine has stopped.
        """
        handle = Handle()
        with self._lock:
            if self.end is None:
                self.by_key[_STOPPING] = Pending(Request(Kind.BARRIER), handle, 0)
                self._board.post(pack(stop_message(why)), driving=True)
        return handle

    def close(self, error: CommError) -> bool:
        """End all pending and later requests with an error. Return False if already closed."""
        with self._lock:
            if self.end is not None:
                return False
            # Set the time first: a thread that sees `end` without the lock reads the time next.
            self.ended_at, self.end = time.monotonic(), error
            pending, self.by_key = self.by_key, {}
        for each in pending.values():
            each.put(error=error)
        return True

    def forked(self, error: CommError) -> None:
        """Drop all requests in a forked child, which lacks the thread that held the lock."""
        self._lock = threading.Lock()
        self.handles, self.by_key = {}, {}
        self.end = error
