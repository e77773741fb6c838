"""The progress loop, and which thread runs it: **the thread that waits drives.**

Coordinating (on rank 0), reading the coordinator's log and running operations is one loop. One
thread at a time runs it, namely the thread that holds the lock `_turn`:

    a caller that waits for a result    if there is one
    the engine's own thread             otherwise; it sleeps while there is no work

So a synchronous operation needs no other thread, and an operation that no caller waits for runs
all the same. A second caller that starts to wait sleeps until its result is available, or until
the first caller leaves and the second must drive.

At intervals the driver also checks for lost ranks and for operations that wait too long.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections import deque

from allstep.console.escape import escaped
from allstep.engine.board.board import Board
from allstep.engine.coordinator import Coordinator
from allstep.engine.dispatch import Dispatch
from allstep.engine.engine_state import EngineState
from allstep.engine.handle import Handle, Sleeper
from allstep.engine.messages import ASK, pack, unpack
from allstep.engine.notices import Notices
from allstep.engine.pending import PendingRequests
from allstep.engine.request import decode
from allstep.engine.settings import Settings
from allstep.engine.stop import Stop
from allstep.errors import PeerLost

# Seconds: the longest sleep, and so the delay after a missed wake-up.
_NAP = 0.05
_DONE = Handle(0)


class Driver:
    """Runs the progress loop in the callers' threads and in a thread of its own.

    `coordinator`: the coordinator on rank 0, None elsewhere.
    """

    def __init__(
        self,
        state: EngineState,
        requests: PendingRequests,
        board: Board,
        dispatch: Dispatch,
        stop: Stop,
        notices: Notices,
        coordinator: Coordinator | None,
        settings: Settings,
    ) -> None:
        self._state, self._requests, self._board, self._settings = state, requests, board, settings
        self._execute, self._stop, self._notices = dispatch.execute, stop, notices
        self._coordinator = coordinator
        # Held by the thread that drives.
        self._turn = threading.Lock()
        self._sleepers: deque[Sleeper] = deque()
        self._checked_at = 0.0
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="allstep-engine", daemon=True)

    def begin(self) -> None:
        """Start the engine's own thread."""
        self._thread.start()

    # In the thread of a caller

    def wait(self, handle: Handle) -> None:
        """Drive, or sleep while another thread drives, until `handle` is done."""
        while not handle.is_done:
            if self._turn.acquire(blocking=False):
                self._drive(handle)
            else:
                self._wait_for_driver(handle)

    def _wait_for_driver(self, handle: Handle) -> None:
        """Wake the thread that drives, and sleep until woken, at most `_NAP` seconds."""
        self._board.nudge()
        handle.sleeper = sleeper = Sleeper()
        self._sleepers.append(sleeper)
        if not handle.is_done:
            sleeper.sleep(_NAP)
        with contextlib.suppress(ValueError):
            self._sleepers.remove(sleeper)

    def _drive(self, handle: Handle, until: float = math.inf) -> None:
        """Run the loop until `handle` is done or the clock reaches `until`; release the turn."""
        board = self._board
        try:
            board.attend()
            self._progress()
            while not handle.is_done and time.monotonic() < until:
                board.wait(_NAP)
                self._progress()
                self._check_health()
        finally:
            board.leave()
            self._turn.release()
            self._wake_next()

    def _wake_next(self) -> None:
        """Wake one thread that waits for the turn. Call it after releasing the turn."""
        if self._sleepers:
            # The thread may have left meanwhile.
            with contextlib.suppress(IndexError):
                self._sleepers.popleft().wake()

    # In the engine's thread

    def _serve(self) -> None:
        """Run the loop while no caller does, until `close`."""
        if self._settings.core is not None:
            # 0 is this thread.
            os.sched_setaffinity(0, [self._settings.core])
        while not self._is_closed:
            self._board.sleep(_NAP)
            self._run_callbacks()
            self._stop.abort_groups()
            if not self._is_closed and self._turn.acquire(blocking=False):
                try:
                    # The error has stopped the engine and is raised in every waiting caller.
                    with contextlib.suppress(Exception):
                        self._progress()
                        self._check_health()
                finally:
                    self._turn.release()
                    self._wake_next()

    def _run_callbacks(self) -> None:
        try:
            if self._requests.end is None:
                self._notices.run_callbacks()
        except BaseException as error:
            self._stop.fail(error)

    # The loop

    def _progress(self) -> None:
        """Process all messages that are available. After the end, discard them."""
        board, requests = self._board, self._requests
        try:
            board.look()
            if self._coordinator is not None:
                self._coordinate(self._coordinator, board)
            for message in board.published():
                if requests.end is None:
                    self._execute(unpack(message))
        except BaseException as error:
            self._stop.fail(error)
            raise

    def _coordinate(self, coordinator: Coordinator, board: Board) -> None:
        """On rank 0: pass the ranks' posts to the coordinator and its answers to all ranks."""
        for rank, message in board.posts():
            fields = unpack(message)
            if fields[0] == ASK:
                for data in fields[1:]:
                    self._state.hooks.reported(decode(data), rank)
            coordinator.take(rank, fields)
        answers = coordinator.answers()
        if answers:
            self._state.hooks.answered()
            board.publish([pack(answer) for answer in answers])

    def _check_health(self) -> None:
        """Check for lost ranks and for operations that wait too long.

        A no-op if the last check was less than `_NAP` / 2 seconds ago.
        """
        now = time.monotonic()
        requests = self._requests
        if now - self._checked_at < _NAP / 2 or requests.end is not None:
            return
        self._checked_at = now
        self._state.hooks.tick()
        # Process states are read only while an operation waits here or, on rank 0, anywhere.
        waits = bool(requests.by_key) or (
            self._coordinator is not None and self._coordinator.is_waiting
        )
        lost = self._board.lost(waits)
        if lost is not None:
            # The rank may have sent the reason.
            self._progress()
            if requests.end is None:
                rank = self._state.world.rank
                self._stop.fail(
                    PeerLost(f"lost rank {lost} (process exited)", rank=rank, peer=lost)
                )
        if self._coordinator is not None and requests.end is None:
            self._check_stalls(self._coordinator)

    def _check_stalls(self, coordinator: Coordinator) -> None:
        """Report stalled operations on standard error, and stop after a timeout."""
        settings = self._settings
        coordinator.expire(settings.timeout)
        if settings.stall:
            report = coordinator.stalls(settings.stall, settings.stall_stop)
            if report:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S")
                level = "E" if coordinator.stopped else "W"
                line = f"[{stamp}: {level} allstep.engine] {report}"
                print(escaped(line, keep="\n"), file=sys.stderr, flush=True)
        if coordinator.stopped:
            self._progress()

    # The end

    def drive_to_end(self, handle: Handle, until: float) -> None:
        """Drive until the engine has stopped or the clock reaches `until`.

        `handle`: the handle of the request to stop.
        """
        while time.monotonic() < until:
            if self._turn.acquire(timeout=_NAP):
                # The error has stopped the engine.
                with contextlib.suppress(Exception):
                    self._drive(handle if self._requests.end is None else _DONE, until)
                if self._requests.end is not None:
                    break

    def close(self) -> None:
        """End the engine's thread. Wait at most 1 s if it is in an operation; see `join`."""
        self._is_closed = True
        self._board.wake()
        self.join(1.0)

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` until the engine's thread has ended; return whether it has."""
        self._thread.join(timeout=seconds)
        return not self._thread.is_alive()

    def forked(self) -> None:
        """Replace the lock in a forked child, which lacks the thread that held it."""
        self._turn = threading.Lock()
