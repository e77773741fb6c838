"""The engine of one process: requests in, results out, and who does the work in between.

A request gets a handle and is posted to the coordinator (rank 0's engine). When all ranks have posted theirs, the coordinator's log says
so, and each rank carries the operation out when it reads it there.

**Whoever waits drives.** Posting, coordinating (on rank 0), reading the log and carrying out is one loop, and one thread at a time runs it:
the caller who waits for a result, if there is one, else a thread of the engine, which sleeps as long as nothing has come. So a synchronous
operation needs no other thread, and one that nobody waits for is done all the same. A second caller who comes to wait sleeps until his
result is there, or until the first one leaves and he is to drive.

**The end.** The engine of the world stops as a whole: when one rank shuts down, fails or is lost, rank 0 tells all (who sees rank 0 end,
stops by himself). Whatever is under way then ends with an error, and so does whatever is asked for later. `shutdown` gives everything back,
and a new engine may be started.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allstep.comm.group.init import session
from allstep.comm.group.joined import Joined
from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.health.at_exit import leave_alone
from allstep.console.escape import escaped
from allstep.engine import messages as say
from allstep.engine.autotune import Autotune, read_autotune
from allstep.engine.board import Board
from allstep.engine.coordinator import Coordinator
from allstep.engine.executor import Executor
from allstep.engine.handle import Handle, Pending, Sleeper
from allstep.engine.hooks import Hooks
from allstep.engine.messages import pack, unpack
from allstep.engine.notices import Notices
from allstep.engine.request import (
    Ask,
    DuplicateName,
    EngineStopped,
    Key,
    Kind,
    Request,
    check,
    decode,
    encode,
    full_names,
    numbers,
)
from allstep.engine.settings import Settings
from allstep.engine.stop_reasons import as_comm_error, error_in, stop_message
from allstep.errors import CollectiveMismatch, CommError, PeerLost

SHUT_DOWN = "Horovod has been shut down"
_NAP = 0.05
_DONE = Handle(0)
_STOPPING: Key = (0, "")  # under which a shutdown waits; no operation has this name
_GRACE = 2.0  # seconds to finish what one is at when another rank shuts down
_LAST_SECONDS = 5.0  # for a shutdown to come around


class Engine:
    """See the module. Made by `start`. on_close: called at the end of `shutdown`."""

    def __init__(
        self,
        joined: Joined,
        board: Board,
        executor: Executor,
        sets: dict[int, tuple[int, ...]],
        settings: Settings,
        on_close: Callable[[], None],
    ) -> None:
        self.world = joined.world
        self._on_close = on_close
        self.process_sets = sets
        self.hooks = Hooks()
        self.is_dynamic = settings.dynamic
        self._joined, self._board, self._executor, self._settings = joined, board, executor, settings
        self._autotune: Autotune | None = None
        self._coordinator = (
            Coordinator(self.world.size, sets, settings.fusion, settings.fuse_groups) if self.world.rank == 0 else None
        )
        self._lock = threading.Lock()  # of the handles and what is pending
        self._last_handle = 0
        self._handles: dict[int, Handle] = {}
        self._pending: dict[Key, Pending] = {}
        self._turn = threading.Lock()  # held by whoever drives
        self._sleepers: deque[Sleeper] = deque()
        self._end: CommError | None = None
        self._ended_at, self._has_let_go = 0.0, False
        self._has_joined = False  # this rank
        self._notices = Notices(board.post, board.wake)
        self._looked_at = 0.0
        self.is_closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="allstep-engine", daemon=True)

    def autotune(self) -> None:
        """Before `begin`, if the environment asks for it. ConfigError when it asks for what cannot be."""
        self._autotune = read_autotune(self.world.rank, self._settings.fusion)
        if self._autotune is not None and self._coordinator is not None:
            self._coordinator.fusion = self._autotune.fusion

    def begin(self) -> None:
        """Until then, what ranks ask for lies on the board; so nothing escapes hooks that are set before."""
        self._thread.start()

    @property
    def hosts(self) -> list[str]:
        """The host of each rank, by a name that no other host has."""
        return self._joined.nodes

    @property
    def handles(self) -> Mapping[int, Handle]:
        """Those that have not been synchronised."""
        return self._handles

    @property
    def is_stopped(self) -> bool:
        """Whether it has ended: by us, by a peer's shutdown, or because one is lost."""
        return self._end is not None

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the rank, which alone can use the engine."""
        return os.getpid() != self._pid

    # Requests

    def enqueue(self, request: Request) -> int:
        """Ask for an operation; a handle for `synchronize`. Never waits for others."""
        return self._enqueue([request], is_group=False)

    def enqueue_group(self, requests: Sequence[Request]) -> int:
        """Ask for several at once: they become ready together, and have one handle."""
        if len({request.tensor.device for request in requests if request.tensor is not None}) > 1:
            raise CommError("tensors of a group must be on same device", op="enqueue_group")
        return self._enqueue(list(requests), is_group=True)

    def perform(self, request: Request) -> Any:
        """Ask for an operation and wait for its result: quicker than `enqueue` and `synchronize`, since no thread need be woken."""
        return self.synchronize(self._enqueue([request], is_group=False, driving=True))

    def _enqueue(self, requests: list[Request], is_group: bool, driving: bool = False) -> int:
        with self._lock:
            self._last_handle = number = self._last_handle + 1
            self._check_end()
            for request in requests:
                self._check(request)
            names = full_names(requests, number)
            keys = [(request.process_set, name) for request, name in zip(requests, names, strict=True)]
            self._check_names(keys)
            handle = self._handles[number] = Handle(len(requests), is_group)
            for index, (request, key) in enumerate(zip(requests, keys, strict=True)):
                self._pending[key] = Pending(request, handle, index)
                self.hooks.submitted(key)
                if request.kind is Kind.JOIN:
                    self._has_joined = True
                    self._executor.device_of_zeros = request.device
                    self._notices.post_all()  # the coordinator is to know how far we have come when it hears that we joined
            if not requests:
                return number
            frame = pack([say.ASK, *(encode(request, name) for request, name in zip(requests, names, strict=True))])
            self._board.post(frame, driving)
        return number

    def _check(self, request: Request) -> None:
        number = request.process_set
        members = self.process_sets.get(number)
        if members is None:
            raise ValueError(f"Invalid process set id {number}: the set does not exist, or has not been registered")
        if self.world.rank not in members:
            raise ValueError(f"rank {self.world.rank} is not a member of process set {number} ({list(members)})")
        check(request, self.world.rank, members)

    def _check_names(self, keys: Sequence[Key]) -> None:
        seen: set[Key] = set()
        for key in keys:
            if key in self._pending or key in seen:
                raise DuplicateName(
                    f"{key[1]}: the tensor has the same name as another tensor that is being processed on rank {self.world.rank}. "
                    "Wait for that one (synchronize), or give this one another name"
                )
            seen.add(key)

    # Results

    def poll(self, handle: int) -> bool:
        """Whether an operation is over, done or failed."""
        found = self._handles.get(handle)
        if found is None:
            raise ValueError(f"handle {handle} was not created or has been cleared")
        is_done = found.is_done
        if not is_done:
            os.sched_yield()  # lets the thread have the interpreter
        return is_done

    def synchronize(self, handle: int) -> Any:
        """Wait for the result and forget the handle. None for a handle that is not known."""
        found = self._handles.get(handle)
        if found is None:
            return None
        try:
            while not found.is_done:
                if self._turn.acquire(blocking=False):
                    self._drive(found)
                else:
                    self._wait_for_driver(found)
        finally:
            if found.is_done:
                self._handles.pop(handle, None)
        return found.value()

    def _wait_for_driver(self, handle: Handle) -> None:
        """Somebody else drives, and may be asleep. Bounded, so that a missed word is a delay."""
        self._board.nudge()
        handle.sleeper = sleeper = Sleeper()
        self._sleepers.append(sleeper)
        if not handle.is_done:
            sleeper.sleep(_NAP)
        with contextlib.suppress(ValueError):
            self._sleepers.remove(sleeper)

    # Driving

    def _drive(self, handle: Handle, until: float = math.inf) -> None:
        """With the turn: until it is done, or so late."""
        board = self._board
        try:
            board.attend()
            self._progress()
            while not handle.is_done and time.monotonic() < until:
                board.wait(_NAP)
                self._progress()
                self._look_after()
        finally:
            board.leave()
            self._turn.release()
            self._call_next()

    def _call_next(self) -> None:
        """The turn is free: somebody who waits may want it."""
        if self._sleepers:
            with contextlib.suppress(IndexError):  # he may have gone
                self._sleepers.popleft().wake()

    def _serve(self) -> None:
        """The thread."""
        if self._settings.core is not None:
            os.sched_setaffinity(0, [self._settings.core])  # 0 is this thread
        while not self.is_closed:
            self._board.sleep(_NAP)
            self._run_errands()
            self._let_go()
            if not self.is_closed and self._turn.acquire(blocking=False):
                try:
                    with contextlib.suppress(Exception):  # it has ended the engine, and whoever waits is told
                        self._progress()
                        self._look_after()
                finally:
                    self._turn.release()
                    self._call_next()

    def _progress(self) -> None:
        """Do all there is to do now. After the end: throw away what still comes."""
        board = self._board
        try:
            board.look()
            if self._coordinator is not None:
                self._coordinate(self._coordinator, board)
            for message in board.told():
                if self._end is None:
                    self._obey(unpack(message))
        except BaseException as error:
            self._fail(error)
            raise

    def _coordinate(self, coordinator: Coordinator, board: Board) -> None:
        """On rank 0."""
        for rank, message in board.posts():
            fields = unpack(message)
            if fields[0] == say.ASK:
                for data in fields[1:]:
                    self.hooks.reported(decode(data), rank)
            coordinator.take(rank, fields)
        answers = coordinator.answers()
        if answers:
            self.hooks.answered()
            board.tell([pack(answer) for answer in answers])

    def _look_after(self) -> None:
        """From time to time: is everybody there, and does nobody wait in vain?"""
        now = time.monotonic()
        if now - self._looked_at < _NAP / 2 or self._end is not None:
            return
        self._looked_at = now
        self.hooks.now_and_then()
        # Flags of processes are read while an operation waits here or, on rank 0, anywhere.
        waits = bool(self._pending) or (self._coordinator is not None and self._coordinator.is_waiting)
        lost = self._board.lost(waits)
        if lost is not None:
            self._progress()  # it may have said why
            if self._end is None:
                self._fail(PeerLost(f"rank {lost} is gone (its process ended)", rank=self.world.rank, peer=lost))
        if self._coordinator is not None and self._end is None:
            self._look_for_stalls(self._coordinator)

    def _look_for_stalls(self, coordinator: Coordinator) -> None:
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

    # What the coordinator says

    def _obey(self, fields: say.Fields) -> None:
        what = fields[0]
        if what == say.DO:
            self._do(fields[1::2], fields[2::2])
        elif what == say.REFUSE:
            self._refused((int(fields[1]), fields[2].decode()), fields[3], fields[4].decode())
        elif what == say.JOINING:
            self._notices.somebody_joined(True)
        elif what == say.JOINED:
            self._has_joined = False
            self._notices.somebody_joined(False)
            self._over((0, "join.noname"), int(fields[1]))
        elif what == say.ADD:
            number, ranks = int(fields[1]), numbers(fields[2].decode())
            self._executor.add_set(number, ranks)
            self.process_sets[number] = ranks
            self._over((0, "process_set.add"), number)
        elif what == say.REMOVE:
            number = int(fields[1])
            del self.process_sets[number]
            self._executor.remove_set(number)
            self._over((0, "process_set.remove"), True)
        elif what == say.NOTICE:
            if self._has_joined:
                self._notices.heard(fields[1].decode(), int(fields[2]))
        else:
            self._stop(error_in(fields, self.world.rank))

    def _do(self, data: Sequence[bytes], more: Sequence[bytes]) -> None:
        asks = [decode(each) for each in data]
        hooks = self.hooks
        hooks.negotiated(asks)
        if self.world.rank not in self.process_sets[asks[0].process_set]:
            return
        pending = [self._pending.pop(ask.key, None) for ask in asks]
        assert self._has_joined or None not in pending, f"not asked for here: {[ask.name for ask in asks]}"
        hooks.begins(asks)
        try:
            requests = [each.wait_for_gpu() if each is not None else None for each in pending]
            results = self._executor.run(asks, more, requests, hooks)
        except BaseException as error:
            hooks.ends(asks, None)
            for each in pending:
                if each is not None:
                    each.put(error=as_comm_error(error, self.world.rank))
            raise
        hooks.ends(asks, results)
        self._tune(asks)
        for each, result in zip(pending, results, strict=True):
            if each is not None:
                each.put(result)

    def _tune(self, asks: Sequence[Ask]) -> None:
        if self._autotune is not None and self._coordinator is not None and asks[0].kind is Kind.ALLREDUCE:
            self._coordinator.fusion = self._autotune.reduced(asks)

    def _over(self, key: Key, result: Any) -> None:
        pending = self._pending.pop(key, None)
        if pending is not None:
            pending.put(result)

    def _refused(self, key: Key, kind: bytes, why: str) -> None:
        self.hooks.refused(key)
        pending = self._pending.pop(key, None) if self.world.rank in self.process_sets.get(key[0], ()) else None
        if pending is not None:
            error = ValueError(why) if kind == say.VALUE else CollectiveMismatch(why, rank=self.world.rank, op=key[1])
            pending.put(error=error)

    # Process sets

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """A new set; its number. All ranks of the world call it in the same order, members or not."""
        self._check_dynamic()
        wanted = tuple(sorted(ranks)) or tuple(range(self.world.size))
        check_ranks(wanted, self.world.size)
        number: int = self.perform(Request(Kind.ADD_SET, splits=wanted))
        return number

    def remove_process_set(self, number: int) -> bool:
        """Whether there was such a set, other than the world. All ranks of the world call it in the same order."""
        self._check_dynamic()
        if number == 0 or number not in self.process_sets:
            return False
        done: bool = self.perform(Request(Kind.REMOVE_SET, splits=(number,)))
        return done

    def _check_dynamic(self) -> None:
        if not self.is_dynamic:
            raise ValueError(
                "process sets can only be added and removed when HOROVOD_DYNAMIC_PROCESS_SETS=1 is set at the start"
            )
        if self._end is not None:
            raise ValueError(f"process sets cannot be changed: {self._end}")

    def group(self, purpose: str, process_set: int) -> AllstepGroup:
        """A group of a set's members beside the engine's own, one for each purpose. They ask for it together.

        A rank may come late to its first use, and is waited for as in any operation; only then do they connect, for which there is
        less time. A rank that has joined comes when the others are already there.
        """
        if not self._executor.has_group(purpose, process_set) and not self._has_joined:
            self.perform(Request(Kind.ALLREDUCE, f"group.{purpose}", torch.zeros(1), process_set=process_set))
        return self._executor.group(purpose, process_set)

    # Notices

    def notice(self, key: str, number: int) -> None:
        """We begin step `number` of `key`. Numbers grow from 1. Ranks that have joined hear of it; while there are none, so does nobody."""
        self._check_end()
        self._notices.begin(key, number)

    def on_notice(self, key: str, callback: Callable[[int], None]) -> None:
        """While this rank has joined, call back with the number of each step of `key` that others begin: once each, in order.

        The callback runs on the engine's thread, while the caller of join drives: it may wait for the other ranks.
        """
        self._notices.callbacks[key] = callback

    def _run_errands(self) -> None:
        try:
            if self._end is None:
                self._notices.run_errands()
        except BaseException as error:
            self._fail(error)

    # The end

    def _check_end(self) -> None:
        """Raise why it has ended, if it has: a new error each time, so that none collects the traces of all."""
        end = self._end
        if end is not None:
            raise type(end)(str(end), rank=end.rank, op=end.op, tensor=end.tensor, peer=end.peer, seconds=end.seconds)

    def _fail(self, error: BaseException) -> None:
        """Something went wrong here: the engines of all ranks stop."""
        if self._end is None:
            known = as_comm_error(error, self.world.rank)
            self._stop(known)
            with contextlib.suppress(Exception):  # they may be gone
                self._board.post(pack(stop_message(known)))
            self._let_go()

    def _let_go(self) -> None:
        """After the end nobody here shall go on waiting on our groups. When it was in order, he may finish what he is at."""
        grace = _GRACE if isinstance(self._end, EngineStopped) else 0.0
        if self._end is not None and not self._has_let_go and time.monotonic() - self._ended_at >= grace:
            self._has_let_go = True
            self._executor.abandon(str(self._end), self._end.peer)

    def _stop(self, error: CommError) -> None:
        with self._lock:
            if self._end is not None:
                return
            self._end, self._ended_at = error, time.monotonic()
            pending, self._pending = self._pending, {}
        for each in pending.values():
            each.put(error=error)
        self.hooks.stopped()

    def shutdown(self) -> None:
        """Stop the engines of all ranks and give everything back."""
        if self.is_closed or self.is_forked:
            return
        self._end_driving()
        self._executor.close()  # a thread that is still in an operation of a rank that hangs is thrown out of it
        self._thread.join(timeout=_LAST_SECONDS)
        self._board.close()
        self._handles.clear()
        session().part()
        self._on_close()

    def leave_at_exit(self) -> None:
        """At exit: tell the others, and let the kernel tear down the rest."""
        if self.is_closed:
            return
        if not self.is_forked:
            self._end_driving()
        leave_alone([self._joined.meeting.store, *self._executor.groups])

    def _end_driving(self) -> None:
        """Have all stop, drive until that has come around or it takes too long, and end the thread."""
        handle, until = Handle(), time.monotonic() + _LAST_SECONDS
        with self._lock:
            if self._end is None:
                self._pending[_STOPPING] = Pending(Request(Kind.BARRIER), handle, 0)
                text = f"{SHUT_DOWN} by rank {self.world.rank}: look at its output if that is not what you meant"
                why = EngineStopped(text, rank=self.world.rank, peer=self.world.rank)
                self._board.post(pack(stop_message(why)), driving=True)
        while time.monotonic() < until:
            if self._turn.acquire(timeout=_NAP):
                with contextlib.suppress(Exception):  # it has ended the engine
                    self._drive(handle if self._end is None else _DONE, until)
                if self._end is not None:
                    break
        self._stop(EngineStopped(f"{SHUT_DOWN} by this rank", rank=self.world.rank))
        self.is_closed = True
        self._board.wake()
        self._thread.join(timeout=1.0)

    def forked(self) -> None:
        """In a child: our place is known, but nothing can be asked for, driven or closed."""
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._handles, self._pending = {}, {}
        self._end = EngineStopped("this process was forked from a rank: only the rank itself can use the engine")


def check_ranks(ranks: Sequence[int], size: int) -> None:
    """Refuse what cannot be a process set."""
    wrong = [rank for rank in ranks if not 0 <= rank < size]
    if wrong:
        raise ValueError(f"process set {list(ranks)}: there is no rank {wrong[0]} among {size} ranks")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"process set {list(ranks)}: a rank is in it twice")
