"""The guard of a group: detects lost and stalled ranks, and spreads a failure to all ranks.

A group owns one guard. The guard knows the operations under way, all connections of the group
(which may contain several Gloo groups), and the memory that its ranks share on this host. A thread
that waits registers its operation (`begin`, `end`), and the watch thread calls `look` twice a
second:

* If no operation is under way for longer than a second, it only checks whether another rank of the
  host has posted a failure.
* A connection that has ended or is silent (see `sockets`) means that its rank is lost. A process of
  this host counts as lost as soon as it is ending, which is earlier (`allstep.process.liveness`).
* An operation that takes longer than ALLSTEP_STALL_SECONDS is reported by one rank, with the
  missing ranks and what they do (see `stall_monitor`). One that takes longer than the group's
  timeout is an error, with the same report.

**A failure ends the group on all ranks.** The first failure counts. It is written to the store and
posted in the memory that the ranks of this host share; then all connections of the group are shut.
That ends every wait on them, here and on other hosts. A rank whose wait ended reads the record of
the rank whose connection ended, and passes it on. A rank whose connection ended without a record is
lost. A rank that leaves in order (its script ends, or `destroy_process_group`) also writes a
record: ranks that still need it get an error from Gloo itself, and the others continue.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch._C._distributed_c10d import Store

from allstep.comm.health.at_exit import destroy_later
from allstep.comm.health.failure import Failure, FailureChannel, Operation, blamed_rank
from allstep.comm.health.failure_records import FailureRecords
from allstep.comm.health.helper_thread import dismiss
from allstep.comm.health.processes import Lives
from allstep.comm.health.sockets import Sockets
from allstep.comm.health.stall_inquiry import rank_list
from allstep.comm.health.stall_monitor import StallMonitor
from allstep.comm.health.threads import watch
from allstep.comm.join.launcher_store import WireStore, is_elastic, root_of
from allstep.errors import CommError
from allstep.limits import Limits, read_limits

# Seconds; the kernel of a stopped process is sometimes silent for one.
_MIN_SILENCE = 2.0
# The kind of a record of a rank that left without a failure.
_LEFT = "left"


class Guard:
    """Detects failures of one group and ends it on all ranks.

    `store` is the part of the store that belongs to this group alone. `names` are the ranks of the
    group as the user counts them. `timeout` is the number of seconds after which a waiting
    operation is an error. `begun` counts the collectives that this rank has called on the group;
    the group updates it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        names: Sequence[int] = (),
        host: str = "",
        limits: Limits | None = None,
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.names = list(names) or list(range(size))
        self.begun = 0
        self.failure: Failure | None = None
        self._limits = limits or read_limits()
        self._store = store
        self._records = FailureRecords(store, rank, self.names[rank])
        self._connections: list[tuple[Sockets, Sequence[int]]] = []
        self._gloos: list[object] = []
        self._channels: list[FailureChannel] = []
        self._lives = Lives()
        # Called at each `look`.
        self.on_look: Callable[[], None] | None = None
        self.under_way: dict[int, Operation] = {}
        self._failing = threading.Lock()
        self._left_in_order: set[int] = set()
        self._begun_seen, self.active_at = 0, time.monotonic()
        self._nbytes_seen, self._moved_at = 0, time.monotonic()
        self._stalls = StallMonitor(self, store, host, self._limits.stall)
        if size > 1:
            watch().add(self)

    def watch_over(self, gloo: object, sockets: Sockets, ranks: Sequence[int] = ()) -> None:
        """Watch a Gloo group and its connections. Its rank i is rank `ranks[i]` of our group."""
        self._gloos.append(gloo)
        self._connections.append((sockets, ranks or range(self.size)))

    def add_channel(self, channel: FailureChannel) -> None:
        """Post failures to, and read them from, memory that ranks of this host share."""
        self._channels.append(channel)

    def watch_processes(self, lives: Lives) -> None:
        """Watch the processes of the other ranks of this host, by rank.

        A rank whose process ends is then lost before its connections close.
        """
        self._lives = lives

    # Operations

    def begin(self, operation: Operation) -> None:
        """Register an operation that a thread waits for; raise if the group has failed."""
        # Before the check, so that a failure from now on finds the operation.
        self.under_way[id(operation)] = operation
        try:
            self.check(operation)
        except CommError:
            self.end(operation)
            raise

    def end(self, operation: Operation) -> None:
        """Remove an operation that no thread waits for any more."""
        self.under_way.pop(id(operation), None)
        self.active_at = time.monotonic()

    @contextlib.contextmanager
    def waiting(self, operation: Operation) -> Iterator[None]:
        """Register an operation over the network; turn errors of Gloo into the group's failure."""
        operation.begin()
        self.begin(operation)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CommError) and error.op is not None:
                raise
            raise self.explain(error, operation) from error
        finally:
            self.end(operation)

    def check(self, operation: Operation | None = None) -> None:
        """Raise the failure of the group, if it has one."""
        self._check_channels()
        if self.failure is not None:
            raise self._error(operation)

    def check_while_waiting(self, operation: Operation | None = None) -> None:
        """Raise the failure of the group, if it has one; also check the processes of this host.

        For waits inside Gloo, where the missing rank is not known.
        """
        lost = self._lives.lost(closely=True)
        if lost is not None and self.failure is None:
            self._check_channels()
            self._lost_process(lost)
        self.check(operation)

    def check_for(self, what: str) -> Callable[[], None]:
        """Return a function for a wait that begins now: it raises the failure of the group.

        `what`: the description of the wait in the error.
        """
        return partial(self.check_while_waiting, Operation(what))

    def _lost_process(self, rank: int) -> None:
        """Fail because a rank's process has ended, unless its record shows that it left before."""
        record = self._records.of([rank]).get(rank)
        if record is not None and record.kind == _LEFT:
            self._lives.forget(rank)
        else:
            self.fail(record or self._peer_lost([rank], "process exited"))

    def _error(self, operation: Operation | None) -> CommError:
        assert self.failure is not None
        return self.failure.error(self.names[self.rank], operation)

    # Failures

    def explain(self, error: BaseException, operation: Operation) -> CommError:
        """End the group after an error of Gloo, and return the error to raise instead of Gloo's."""
        if self.failure is None:
            self.fail(self._overdue(operation) or self._reason_of_closing() or self._unknown(error))
        return self._error(operation)

    def _overdue(self, operation: Operation) -> Failure | None:
        """Return the failure of an operation whose own timeout, enforced by Gloo, has expired."""
        if operation.limit is None or operation.seconds < 0.9 * operation.limit:
            return None
        return self._failure(
            "CollectiveTimeout",
            f"not finished within its timeout of {operation.limit:.1f} s",
            None,
        )

    def _unknown(self, error: BaseException) -> Failure:
        return self._failure("CommError", f"Gloo failed: {str(error).partition(chr(10))[0]}", None)

    def fail(self, failure: Failure) -> None:
        """End the group on all ranks.

        The first failure counts. When this returns, the group has a failure and it has been
        published. In an elastic run the loss of a rank ends its whole generation, so the other
        groups of this process fail, too.
        """
        if self._fail(failure, self._records.leave) and is_elastic(self._store):
            watch().fail_all(failure)

    def fail_alone(self, failure: Failure) -> None:
        """End the group in this process; other ranks learn of it from the launcher."""
        self._fail(failure, lambda _: None)

    def _fail(self, failure: Failure, publish: Callable[[Failure], None]) -> bool:
        """End the group; return False if it had ended before."""
        with self._failing:
            if self.failure is not None:
                return False
            publish(failure)
            for channel in self._channels:
                channel.post(failure)
            # From now on waiting threads raise. The other ranks of this host know of it by then.
            self.failure = failure
            for sockets, _ in self._connections:
                sockets.shut()
        for operation in list(self.under_way.values()):
            if operation.on_failure is not None:
                operation.on_failure()
        return True

    def lose(self, rank: int) -> None:
        """Fail because the process of a rank of this host has ended, unless a failure is posted."""
        self._check_channels()
        self.fail(self._peer_lost([rank], "process exited"))

    def _check_channels(self) -> None:
        for channel in self._channels:
            failure = channel.posted() if self.failure is None else None
            if failure is not None:
                self.fail(failure)

    def any_closed(self) -> bool:
        """Return whether a connection has ended."""
        return bool(self._lost(Sockets.closed))

    def _failure(self, kind: str, reason: str, peer: int | None) -> Failure:
        return Failure(kind, reason, peer, self.names[self.rank])

    def own_end(self, what: str) -> Failure:
        """Return a failure that this rank causes itself. `what`: what it did."""
        return self._failure("CommError", f"rank {(me := self.names[self.rank])} has {what}", me)

    def _peer_lost(self, ranks: Sequence[int], why: str) -> Failure:
        reason = f"lost {rank_list(ranks, self.names)} ({why})"
        return self._failure("PeerLost", reason, self.names[ranks[0]])

    def _lost(self, how: Callable[[Sockets], set[int]]) -> list[int]:
        """Return the ranks that `how` finds in the connections of any of the Gloo groups."""
        known = self._connections
        return sorted({ranks[peer] for sockets, ranks in known for peer in how(sockets)})

    def _reason_of_closing(self, *, peaceful_too: bool = True) -> Failure | None:
        """Return why connections have ended, if that is a failure.

        A rank without a record is lost; else the first record of a failure counts; else the ranks
        left in order, which is a failure only with `peaceful_too`, when an operation needed them.
        """
        closed = [
            rank
            for rank in self._lost(Sockets.closed)
            if peaceful_too or rank not in self._left_in_order
        ]
        records = self._records.of(closed)
        dead = [rank for rank in closed if rank not in records]
        if dead:
            return self._peer_lost(dead, self._last_sign(dead[0]))
        failures = [record for record in records.values() if record.kind != _LEFT]
        if failures:
            return failures[0]
        self._left_in_order.update(closed)
        return (
            self._peer_lost(closed, "left the group while other ranks need it")
            if closed and peaceful_too
            else None
        )

    def _last_sign(self, rank: int) -> str:
        seconds = max(
            sockets.silence(ranks.index(rank))
            for sockets, ranks in self._connections
            if rank in ranks
        )
        return (
            "process exited"
            if seconds < self._limits.lost / 2
            else f"no sign of life for {seconds:.0f} s"
        )

    # The watch

    @property
    def tick(self) -> float:
        """Seconds between two calls of `look`."""
        return min(0.5, self._limits.lost / 8, self._limits.stall / 8, self.timeout / 8)

    def look(self) -> None:
        """Check for failures; called by the watch thread. Must not block."""
        try:
            self._look()
        # An error of the guard itself must not leave the ranks waiting.
        except Exception as error:
            self.fail(self._failure("CommError", f"the guard of the group failed: {error!r}", None))

    def _look(self) -> None:
        now = time.monotonic()
        if self.begun != self._begun_seen:
            self._begun_seen, self.active_at = self.begun, now
        self._check_channels()
        if self.on_look is not None:
            self.on_look()
        under_way = list(self.under_way.values())
        old = [operation for operation in under_way if now - operation.began > self.young]
        if not old or self.failure is not None:
            return
        failure = self._lost_now(now)
        if failure is None:
            failure = self._stalls.check(min(old, key=lambda operation: operation.began))
        if failure is not None:
            self.fail(failure)

    def round(self) -> float:
        """Answer the questions of other ranks about stalls; return seconds until the next call.

        Called by the runner thread, since the store may block.
        """
        return self._stalls.round()

    @property
    def young(self) -> float:
        """Seconds for which an operation is not checked."""
        return min(1.0, self._limits.lost / 4, self.timeout / 8)

    def _lost_now(self, now: float) -> Failure | None:
        # Called first, because it also records when each connection ended.
        any_closed = self.any_closed()
        # A rank that is cut off from the store as well waits two more seconds for the store before
        # it raises.
        silence = max(_MIN_SILENCE, 0.6 * self._limits.lost)
        silent = self._lost(lambda sockets: sockets.silent(silence))
        if silent:
            return self._peer_lost(silent, f"no sign of life for {silence:.0f} s")
        nbytes = sum(sockets.nbytes() for sockets, _ in self._connections)
        if nbytes != self._nbytes_seen:
            self._nbytes_seen, self._moved_at = nbytes, now
        # A rank that has done its part may leave while its data is still on the way to us.
        at_rest = now - self._moved_at > self.young
        return self._reason_of_closing(peaceful_too=False) if any_closed and at_rest else None

    # The end

    def leave(self) -> None:
        """Write why this process ends, or that it leaves in order; called by the runner at exit."""
        error = getattr(sys, "last_value", None)
        if error is None:
            self._record_leaving()
        elif self.failure is None:
            name = self.names[self.rank]
            reason = f"lost rank {name} (exited with {type(error).__name__}: {error})"
            self._records.write(self._failure("PeerLost", reason, name))
            self._records.record(self._failure("CommError", reason, blamed_rank(error, name)))

    def abandon(self) -> None:
        """Make calls that wait for the store return: the process ends now."""
        store = root_of(self._store)
        if isinstance(store, WireStore):
            store.client.abandon()

    def _record_leaving(self) -> None:
        """Record that this rank leaves in order, unless the group has failed."""
        if self.failure is None:
            name = self.names[self.rank]
            self._records.write(self._failure(_LEFT, f"rank {name} has left the group", name))

    def close(self, group: object) -> None:
        """Release everything: the group is destroyed.

        `group` is the other object that holds the Gloo groups.
        """
        if self.size > 1:
            if self.failure is None:
                self._records.at_store(self._record_leaving)
            if watch().remove(self):
                dismiss()
        with self._failing:
            if self.failure is not None and self._gloos:
                destroy_later(self._gloos, group)
            for sockets, _ in self._connections:
                sockets.close()
            for owned in (self._gloos, self._connections, self._channels):
                owned.clear()
            self._lives.close()
