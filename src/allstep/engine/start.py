"""The engine of this process: started by the first `init`, closed by `shutdown` or at exit."""

import atexit
import json
import os
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from allstep import machine
from allstep.comm.group.init import session
from allstep.comm.group.joined import Joined
from allstep.comm.join.launcher_store import collect
from allstep.comm.memory.kept import new_memory
from allstep.comm.memory.segment import CannotShare
from allstep.comm.memory.wait_flags import spins_for
from allstep.engine.board.board import Board
from allstep.engine.board.shared_board import BOARD, SharedBoard, board_sizes
from allstep.engine.board.socket_board import connect
from allstep.engine.engine import Engine, check_ranks
from allstep.engine.executor import Executor
from allstep.engine.hooks import Hooks
from allstep.engine.settings import read_settings
from allstep.errors import CollectiveTimeout


class _EngineState:
    """Holds the engine of this process, if one runs."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._is_registered = False

    def register(self) -> None:
        """Close the engine at exit if `shutdown` is not called; disable it in forked children."""
        if not self._is_registered:
            atexit.register(self._at_exit)
            os.register_at_fork(after_in_child=self._forked)
            self._is_registered = True

    def forget(self) -> None:
        """Drop the closed engine, so that its memory and connections are freed."""
        self.engine = None

    def _at_exit(self) -> None:
        if self.engine is not None:
            self.engine.leave_at_exit()

    def _forked(self) -> None:
        if self.engine is not None:
            self.engine.forked()


_process = _EngineState()


def current() -> Engine | None:
    """Return the engine of this process from `start` until its own `shutdown`, else None.

    An engine that another rank has stopped is still returned.
    """
    engine = _process.engine
    return None if engine is None or engine.is_closed else engine


def start(
    process_sets: Sequence[Sequence[int]] = (),
    dynamic: bool = False,
    hooks: Callable[[Engine], Hooks] | None = None,
) -> Engine:
    """Connect to the other ranks and start the engine; return the running one on a second call.

    torch's default group is not changed. `process_sets`: the ranks of sets 1, 2, ..., the same on
    all ranks; a duplicate, or the whole world, gets no number of its own. `dynamic`: whether sets
    may be added and removed later (as with HOROVOD_DYNAMIC_PROCESS_SETS=1); default False. `hooks`:
    a function that makes the listener, which then sees every operation; an exception in it stops
    the engines of all ranks.
    """
    running = current()
    if running is not None:
        return running
    engine = _join_and_start(process_sets, dynamic)
    _process.engine = engine
    _process.register()
    _begin(engine, hooks)
    return engine


def _join_and_start(process_sets: Sequence[Sequence[int]], dynamic: bool) -> Engine:
    """Start the engine; if the world of an elastic run ends meanwhile, in the next one."""
    while True:
        joined = session().join()
        try:
            return _start(joined, process_sets, dynamic)
        except BaseException as error:
            session().part()
            if not session().may_join_next(joined, error):
                raise


def _begin(engine: Engine, hooks: Callable[[Engine], Hooks] | None) -> None:
    """Set up autotuning and hooks, then begin.

    An error here concerns one rank alone, after all ranks have connected. So the engine begins and
    shuts down, which informs the other ranks.
    """
    try:
        engine.autotune()
        if hooks is not None:
            engine.hooks = hooks(engine)
    except BaseException:
        engine.begin()
        engine.shutdown()
        raise
    engine.begin()


def _start(joined: Joined, process_sets: Sequence[Sequence[int]], dynamic: bool) -> Engine:
    world, limits = joined.world, joined.limits
    settings = read_settings(limits, world.local_rank, dynamic)
    store = joined.fresh_store("engine")
    sets = _numbered(process_sets, world.size)
    _check_alike(joined, store, sets)
    board = _make_board(joined, store)
    executor = Executor(store, world.rank, limits.start, limits.timeout, joined.group_options)
    try:
        for number, ranks in sets.items():
            executor.add_set(number, ranks)
        joined.wait_for_all("engine ready")
    except BaseException:
        executor.close()
        board.close()
        raise
    return Engine(joined, board, executor, sets, settings, _process.forget)


def _numbered(process_sets: Sequence[Sequence[int]], size: int) -> dict[int, tuple[int, ...]]:
    """Number the sets: the world is 0, the others follow."""
    sets = {0: tuple(range(size))}
    for ranks in process_sets:
        wanted = tuple(sorted(ranks)) or sets[0]
        check_ranks(wanted, size)
        if wanted not in sets.values():
            sets[len(sets)] = wanted
    return sets


def _check_alike(joined: Joined, store: Store, sets: dict[int, tuple[int, ...]]) -> None:
    rank, size = joined.world.rank, joined.world.size
    mine = json.dumps(list(sets.values()))
    check, seconds = joined.check_for("the process sets", store, "sets"), joined.limits.start
    try:
        found = collect(store, "sets", rank, size, mine, seconds, check)
    except DistStoreError:
        late = [other for other in range(size) if not store.check([f"sets/{other}"])]
        raise CollectiveTimeout(
            f"init: {len(late)} of {size} ranks have not come within {seconds:g} s:"
            f" {', '.join(f'rank {other}' for other in late)}; look at their output, or raise"
            " ALLSTEP_START_TIMEOUT if they start slowly",
            rank=rank,
            op="init",
            peer=late[0] if late else None,
            seconds=seconds,
        ) from None
    for other, theirs in enumerate(found):
        if theirs != mine:
            raise ValueError(
                f"process sets differ: rank {rank} has {mine}, rank {other} has {theirs} (the"
                " world first); give all ranks the same sets"
            )


def _make_board(joined: Joined, store: Store) -> Board:
    """Use shared memory if all ranks are on one host and can share it, else sockets; never both."""
    world, cards = joined.world, joined.cards
    if len(set(joined.nodes)) > 1:
        return connect(store, world.rank, world.size, joined.limits, joined.neighbours)
    sizes, ranks = board_sizes(world.size), range(world.size)
    num_cores = len(set().union(*(card["cores"] for card in cards)))
    spins = spins_for(world.size, min(num_cores, int(machine.cpu_quota() or num_cores)))
    seconds = joined.limits.start
    try:
        memory = (
            new_memory(store, world.rank, world.size, sizes, seconds)
            if joined.memory is None
            else joined.memory.get(BOARD, ranks, sizes, store, world.rank, seconds)
        )
    # Raised on all ranks.
    except CannotShare:
        return connect(store, world.rank, world.size, joined.limits, joined.neighbours)
    pids = [card["pid"] for card in cards]
    return SharedBoard(memory, world.rank, pids, spins if world.size > 1 else 0)
