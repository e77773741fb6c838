"""The engine of one process, as callers see it: requests in, results out.

A request gets a handle and is posted to the coordinator (rank 0's engine). When all ranks have
posted theirs, the coordinator adds the operation to its log, and each rank runs the operation when
it reads that entry:

    pending     requests and handles, from the request to its result
    driver      the progress loop: the thread that waits for a result drives
    dispatch    executes the messages of the coordinator's log
    stop        stops the engines of all ranks: after shutdown, an error or the loss of a rank

`shutdown` frees everything; a new engine may then be started.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allstep.comm.group.init import session
from allstep.comm.group.joined import Joined
from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.health.at_exit import leave_alone
from allstep.comm.memory.kept import kept_memory
from allstep.engine.autotune import read_autotune
from allstep.engine.board.board import Board
from allstep.engine.board.shared_board import BOARD
from allstep.engine.coordinator import Coordinator
from allstep.engine.dispatch import Dispatch
from allstep.engine.driver import Driver
from allstep.engine.engine_state import EngineState
from allstep.engine.executor import Executor
from allstep.engine.handle import Handle
from allstep.engine.hooks import Hooks
from allstep.engine.notices import Notices
from allstep.engine.pending import PendingRequests
from allstep.engine.request import EngineStopped, Kind, Request
from allstep.engine.settings import Settings
from allstep.engine.stop import SHUT_DOWN, Stop, shut_down_by
from allstep.errors import CommError

# The time for a shutdown to reach all ranks.
_LAST_SECONDS = 5.0


class Engine:
    """Runs named asynchronous operations on this rank; `start` creates it.

    `process_sets`: the ranks of each set by its number; 0 is the world. `is_dynamic`: whether sets
    may be added and removed. `is_closed`: whether the engine has been shut down. `on_close`: called
    after the shutdown.
    """

    def __init__(
        self,
        joined: Joined,
        board: Board,
        executor: Executor,
        sets: dict[int, tuple[int, ...]],
        settings: Settings,
        on_close: Callable[[], None],
    ) -> None:
        self.world = world = joined.world
        self.process_sets = sets
        self.is_dynamic = settings.dynamic
        self.is_closed = False
        self._on_close = on_close
        self._joined, self._board = joined, board
        self._executor, self._settings = executor, settings
        self._coordinator = coordinator = (
            Coordinator(world.size, sets, settings.fusion, settings.fuse_groups)
            if world.rank == 0
            else None
        )
        self._state = state = EngineState(world, sets)
        self._notices = notices = Notices(board.post, board.wake)
        self._requests = requests = PendingRequests(state, board, executor, notices)
        self._stop = stop = Stop(state, requests, board, executor)
        self._dispatch = dispatch = Dispatch(state, requests, executor, notices, stop, coordinator)
        self._driver = Driver(
            state,
            requests,
            board,
            dispatch,
            stop,
            notices,
            coordinator,
            settings,
        )
        self._pid = os.getpid()

    def autotune(self) -> None:
        """Tune the fusion threshold if the environment requests it. Call it before `begin`.

        Raise ConfigError for an invalid environment variable.
        """
        self._dispatch.autotune = autotune = read_autotune(self.world.rank, self._settings.fusion)
        if autotune is not None and self._coordinator is not None:
            self._coordinator.fusion = autotune.fusion

    def begin(self) -> None:
        """Start to process requests.

        Requests wait on the board until then, so early hooks see them all.
        """
        self._driver.begin()

    @property
    def hooks(self) -> Hooks:
        """The listener; may be replaced at any time."""
        return self._state.hooks

    @hooks.setter
    def hooks(self, hooks: Hooks) -> None:
        self._state.hooks = hooks

    @property
    def hosts(self) -> list[str]:
        """The host of each rank, under a name that is unique to the host."""
        return self._joined.nodes

    @property
    def handles(self) -> Mapping[int, Handle]:
        """The handles that have not been synchronized, by number."""
        return self._requests.handles

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has stopped: by this rank, by a peer, or after losing a rank."""
        return self._requests.end is not None

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the rank; a child cannot use the engine."""
        return os.getpid() != self._pid

    # Requests and results

    def enqueue(self, request: Request) -> int:
        """Request an operation; return a handle for `synchronize`. Never waits for other ranks."""
        return self._requests.submit([request], is_group=False)

    def enqueue_group(self, requests: Sequence[Request]) -> int:
        """Request several operations at once: they become ready together and share one handle."""
        if len({request.tensor.device for request in requests if request.tensor is not None}) > 1:
            raise CommError("tensors of a group must be on same device", op="enqueue_group")
        return self._requests.submit(list(requests), is_group=True)

    def perform(self, request: Request) -> Any:
        """Request an operation and wait for its result.

        Faster than `enqueue` and `synchronize`, since no thread is woken.
        """
        return self.synchronize(self._requests.submit([request], is_group=False, driving=True))

    def poll(self, handle: int) -> bool:
        """Return whether an operation has finished, with a result or an error."""
        found = self._requests.handles.get(handle)
        if found is None:
            raise ValueError(f"handle {handle} was not created or has been cleared")
        is_done = found.is_done
        if not is_done:
            # Give the engine's thread a chance to run.
            os.sched_yield()
        return is_done

    def synchronize(self, handle: int) -> Any:
        """Wait for the result and release the handle. Return None for an unknown handle."""
        found = self._requests.handles.get(handle)
        if found is None:
            return None
        try:
            self._driver.wait(found)
        finally:
            if found.is_done:
                self._requests.handles.pop(handle, None)
        return found.value()

    # Process sets

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Add a process set and return its number.

        All ranks of the world call it in the same order, members or not. `ranks`: the members;
        empty means all ranks.
        """
        self._check_dynamic()
        wanted = tuple(sorted(ranks)) or tuple(range(self.world.size))
        check_ranks(wanted, self.world.size)
        number: int = self.perform(Request(Kind.ADD_SET, splits=wanted))
        return number

    def remove_process_set(self, number: int) -> bool:
        """Remove a process set. Return False if there is no such set, or if it is the world.

        All ranks of the world call it in the same order.
        """
        self._check_dynamic()
        if number == 0 or number not in self.process_sets:
            return False
        done: bool = self.perform(Request(Kind.REMOVE_SET, splits=(number,)))
        return done

    def _check_dynamic(self) -> None:
        if not self.is_dynamic:
            raise ValueError(
                "process sets can only be added and removed when HOROVOD_DYNAMIC_PROCESS_SETS=1 is"
                " set at the start"
            )
        if self._requests.end is not None:
            raise ValueError(f"process sets cannot be changed: {self._requests.end}")

    def group(self, purpose: str, process_set: int) -> AllstepGroup:
        """Return the process group of a set for one purpose, apart from the engine's own group.

        All members call it together. Before the first use, late ranks are waited for as in any
        operation; only then do the ranks connect, with a shorter timeout. A rank that has joined
        skips that wait, since the other ranks have already arrived.
        """
        if not self._executor.has_group(purpose, process_set) and not self._state.has_joined:
            self.perform(
                Request(Kind.ALLREDUCE, f"group.{purpose}", torch.zeros(1), process_set=process_set)
            )
        return self._executor.group(purpose, process_set)

    # Notices

    def notice(self, key: str, number: int) -> None:
        """Announce that this rank begins step `number` of `key`; numbers grow from 1.

        Sent only to ranks that have joined; a no-op while there are none.
        """
        self._requests.check_end()
        self._notices.begin(key, number)

    def on_notice(self, key: str, callback: Callable[[int], None]) -> None:
        """Set the callback for steps of `key` that other ranks begin after this rank has joined.

        It is called with the number of each step, once each, in order. It runs on the engine's
        thread, while the caller of join drives: it may wait for the other ranks.
        """
        self._notices.callbacks[key] = callback

    # The end

    def shutdown(self) -> None:
        """Stop the engines of all ranks and free everything."""
        if self.is_closed or self.is_forked:
            return
        self._end_driving()
        # Also aborts an operation in which the engine's thread still waits for a rank that hangs.
        self._executor.close()
        if not self._driver.join(_LAST_SECONDS):
            # The thread may still write into our mailbox.
            kept_memory().drop(BOARD)
        self._board.close()
        self._requests.handles.clear()
        session().part()
        self._on_close()

    def leave_at_exit(self) -> None:
        """Stop the engines of all ranks at exit; the kernel frees the rest."""
        if self.is_closed:
            return
        if not self.is_forked:
            self._end_driving()
        leave_alone([self._joined.rendezvous.store, *self._executor.groups])

    def _end_driving(self) -> None:
        """Stop all ranks, drive until this rank has stopped or for 5 s, and end the thread."""
        until = time.monotonic() + _LAST_SECONDS
        self._driver.drive_to_end(self._requests.submit_stop(shut_down_by(self.world.rank)), until)
        self._stop.stop(EngineStopped(f"{SHUT_DOWN} by this rank", rank=self.world.rank))
        self.is_closed = True
        self._driver.close()

    def forked(self) -> None:
        """Make this copy unusable in a forked child: only its rank and sets can still be read."""
        self._driver.forked()
        self._requests.forked(
            EngineStopped(
                "this process was forked from a rank: only the rank itself can use the engine"
            )
        )


def check_ranks(ranks: Sequence[int], size: int) -> None:
    """Raise ValueError for ranks that cannot form a process set."""
    wrong = [rank for rank in ranks if not 0 <= rank < size]
    if wrong:
        raise ValueError(
            f"process set {list(ranks)}: there is no rank {wrong[0]} among {size} ranks"
        )
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"process set {list(ranks)}: a rank is in it twice")
