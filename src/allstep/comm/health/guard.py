"""The guard of a group: what is under way on it, whether the others are still there, and how a
failure reaches all of them.

A group owns one guard. The guard knows all connections of the group, which may have several Gloo
groups inside, and the memory that it shares on this host. Whoever waits tells it what for (`begin`,
`end`), and the watch has it `look` twice a second:

* Nothing is under way, or not for a second: nothing to do, but to look whether another rank of the
  host tells of a failure.
* A connection has ended or is silent (see `sockets`): that rank is lost. A process of this host is
  lost as soon as it is ending, which is earlier (`allstep.process.liveness`).
* It takes longer than ALLSTEP_STALL_SECONDS: one rank reports who is missing and what they do (see
  `stall`). Longer than the group's time-out: it is an error, with the same report.

**A failure ends the group on all ranks.** The first failure wins. It is left as a word in the store
and on the board that the ranks of this host share; then all connections of the group are ended.
That stops whoever waits on one, here and elsewhere; he finds the word of the rank whose connection
ended, and passes it on. A rank whose connection ended without a word is dead. One that just leaves
(its script is over, or `destroy_process_group`) leaves word of that, too: those who still need it
get an error from Gloo itself, and the others are not disturbed.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch._C._distributed_c10d import Store

from allstep.comm.health import stall
from allstep.comm.health.at_exit import destroy_later
from allstep.comm.health.failure import Failure, Operation, blamed_rank
from allstep.comm.health.helper_thread import dismiss
from allstep.comm.health.processes import Lives
from allstep.comm.health.sockets import Sockets
from allstep.comm.health.stack_lines import main_threads_lines, thread_lines
from allstep.comm.health.stall import Answer, Inquiry, Questions
from allstep.comm.health.failure_records import STORE_SECONDS, FailureRecords
from allstep.comm.health.threads import watch
from allstep.comm.join.store import WireStore, root_of
from allstep.console.escape import escaped
from allstep.errors import CommError
from allstep.limits import Limits, read_limits

_MIN_SILENCE = 2.0  # seconds; the kernel of a stopped process is sometimes silent for one
_LEFT = "left"  # the kind of a word that tells of no failure


class FailureChannel(Protocol):
    """The memory that ranks of a host share, as far as failures go: a place for a word that all of
    them see."""

    def post(self, failure: Failure) -> None: ...

    def posted(self) -> Failure | None: ...


class Guard:
    """One per group.

    store: of this group alone. names: the ranks of the group as the user counts them. timeout:
    seconds after which an operation that waits is an error. begun: the collectives that this rank
    has called on the group, counted by the group itself.
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
        self._host = host
        self._limits = limits or read_limits()
        self._store = store
        self._records = FailureRecords(store, rank, self.names[rank])
        self._questions = Questions(store, rank, size)
        self._connections: list[tuple[Sockets, Sequence[int]]] = []
        self._gloos: list[object] = []
        self._channels: list[FailureChannel] = []
        self._lives = Lives()
        self._under_way: dict[int, Operation] = {}
        self._failing = threading.Lock()
        self._left_in_order: set[int] = set()
        self._begun_seen, self._active_at = 0, time.monotonic()
        self._nbytes_seen, self._moved_at = 0, time.monotonic()
        if size > 1:
            watch().add(self)

    def watch_over(self, gloo: object, sockets: Sockets, ranks: Sequence[int] = ()) -> None:
        """Look after a Gloo group and its connections. Its rank i is rank `ranks[i]` of ours."""
        self._gloos.append(gloo)
        self._connections.append((sockets, ranks or range(self.size)))

    def add_channel(self, channel: FailureChannel) -> None:
        """Tell the ranks of this host of a failure there."""
        self._channels.append(channel)

    def watch_processes(self, pids: Mapping[int, int]) -> None:
        """Of the other ranks of this host, by rank: those that end are lost before their
        connections close."""
        self._lives = Lives(pids)

    # Operations

    def begin(self, operation: Operation) -> None:
        """Somebody waits for it; raises when that is in vain."""
        self._under_way[id(operation)] = operation  # before we look: a failure from now on finds it
        try:
            self.check(operation)
        except CommError:
            self.end(operation)
            raise

    def end(self, operation: Operation) -> None:
        self._under_way.pop(id(operation), None)
        self._active_at = time.monotonic()

    @contextlib.contextmanager
    def waiting(self, operation: Operation) -> Iterator[None]:
        """Wait for an operation over the network: errors of Gloo become the failure of the group."""
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
        """`check`, for one who waits for Gloo and cannot know for which rank: also looks at the
        processes of this host."""
        lost = self._lives.lost(closely=True)
        if lost is not None and self.failure is None:
            self._check_channels()
            self._lost_process(lost)
        self.check(operation)

    def _lost_process(self, rank: int) -> None:
        """A rank's process has ended; a word in the store tells whether it had left the group
        before."""
        record = self._records.of([rank]).get(rank)
        if record is not None and record.kind == _LEFT:
            self._lives.forget(rank)
        else:
            self.fail(record or self._gone([rank], "its process ended"))

    def _error(self, operation: Operation | None) -> CommError:
        assert self.failure is not None
        return self.failure.error(self.names[self.rank], operation)

    # Failures

    def explain(self, error: BaseException, operation: Operation) -> CommError:
        """Gloo failed in an operation: the group ends. What to raise instead of Gloo's error."""
        if self.failure is None:
            self.fail(self._overdue(operation) or self._reason_of_closing() or self._unknown(error))
        return self._error(operation)

    def _overdue(self, operation: Operation) -> Failure | None:
        """The time-out that the call itself was given, which Gloo sees to."""
        if operation.limit is None or operation.seconds < 0.9 * operation.limit:
            return None
        return self._failure(
            "CollectiveTimeout",
            f"not over within the {operation.limit:.1f} s that it was given",
            None,
        )

    def _unknown(self, error: BaseException) -> Failure:
        return self._failure("CommError", f"Gloo failed: {str(error).partition(chr(10))[0]}", None)

    def fail(self, failure: Failure) -> None:
        """End the group on all ranks.

        The first failure wins; when this returns there is one, and word of it is out.
        """
        with self._failing:
            if self.failure is not None:
                return
            self._records.leave(failure)
            for channel in self._channels:
                channel.post(failure)
            # whoever waits here raises from now on: the others of this host know of it by then
            self.failure = failure
            for sockets, _ in self._connections:
                sockets.shut()
        for operation in list(self._under_way.values()):
            if operation.on_failure is not None:
                operation.on_failure()

    def lose(self, rank: int) -> None:
        """The process of a rank of this host has ended; it may have posted why."""
        self._check_channels()
        self.fail(self._gone([rank], "its process ended"))

    def _check_channels(self) -> None:
        for channel in self._channels:
            failure = channel.posted() if self.failure is None else None
            if failure is not None:
                self.fail(failure)

    def any_closed(self) -> bool:
        """Whether a connection has ended."""
        return bool(self._lost(Sockets.closed))

    def _failure(self, kind: str, reason: str, peer: int | None) -> Failure:
        return Failure(kind, reason, peer, self.names[self.rank])

    def own_end(self, what: str) -> Failure:
        """A failure that this rank causes itself. what: it did."""
        name = self.names[self.rank]
        return self._failure("CommError", f"rank {name} has {what}", name)

    def _gone(self, ranks: Sequence[int], why: str) -> Failure:
        verb = "is" if len(ranks) == 1 else "are"
        return self._failure(
            "PeerLost",
            f"{stall.rank_list(ranks, self.names)} {verb} gone ({why})",
            self.names[ranks[0]],
        )

    def _lost(self, how: Callable[[Sockets], set[int]]) -> list[int]:
        """Ranks of the group that one of its Gloo groups has lost."""
        return sorted(
            {ranks[peer] for sockets, ranks in self._connections for peer in how(sockets)}
        )

    def _reason_of_closing(self, *, peaceful_too: bool = True) -> Failure | None:
        """Why connections have ended: somebody died without a word, or else what a word says."""
        closed = [
            rank
            for rank in self._lost(Sockets.closed)
            if peaceful_too or rank not in self._left_in_order
        ]
        records = self._records.of(closed)
        dead = [rank for rank in closed if rank not in records]
        if dead:
            return self._gone(dead, self._last_sign(dead[0]))
        told = [record for record in records.values() if record.kind != _LEFT]
        if told:
            return told[0]
        self._left_in_order.update(closed)
        return (
            self._gone(closed, "it has left the group while others need it")
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
            "its process ended"
            if seconds < self._limits.lost / 2
            else f"no sign of life for {seconds:.0f} s"
        )

    # The watch

    @property
    def tick(self) -> float:
        return min(0.5, self._limits.lost / 8, self._limits.stall / 8, self.timeout / 8)

    def look(self) -> None:
        """Called by the watch: is anything wrong?"""
        try:
            self._look()
        except Exception as error:  # ours, but nobody may wait for ever because of it
            self.fail(self._failure("CommError", f"the guard of the group failed: {error!r}", None))

    def _look(self) -> None:
        now = time.monotonic()
        if self.begun != self._begun_seen:
            self._begun_seen, self._active_at = self.begun, now
        self._check_channels()
        old = [
            operation
            for operation in list(self._under_way.values())
            if now - operation.began > self.young
        ]
        if not old or self.failure is not None:
            return
        lost = self._lost_now(now)
        if lost is not None:
            self.fail(lost)
        else:
            self._look_at_clock(min(old, key=lambda operation: operation.began))

    @property
    def young(self) -> float:
        """Seconds for which nobody worries."""
        return min(1.0, self._limits.lost / 4, self.timeout / 8)

    def _lost_now(self, now: float) -> Failure | None:
        any_closed = self.any_closed()  # noted with its time, also when we wait on
        # A rank that is cut off from the store as well gives that two seconds more before it
        # raises.
        silence = max(_MIN_SILENCE, 0.6 * self._limits.lost)
        silent = self._lost(lambda sockets: sockets.silent(silence))
        if silent:
            return self._gone(silent, f"no sign of life for {silence:.0f} s")
        nbytes = sum(sockets.nbytes() for sockets, _ in self._connections)
        if nbytes != self._nbytes_seen:
            self._nbytes_seen, self._moved_at = nbytes, now
        # Whoever has done its part may go, and what it sent may still be on its way to us.
        at_rest = now - self._moved_at > self.young
        return self._reason_of_closing(peaceful_too=False) if any_closed and at_rest else None

    # Stalls

    @property
    def _every(self) -> float:
        """Seconds between looks for questions."""
        return min(5.0, self._limits.stall / 4, self.timeout / 4)

    @property
    def _answer_seconds(self) -> float:
        """Seconds in which a rank that can answer does."""
        return 1.5 * self._every + 0.2

    def _look_at_clock(self, operation: Operation) -> None:
        seconds = operation.seconds
        if seconds > self.timeout - self._answer_seconds:
            self._inquire(operation, "last")
        elif seconds > self._limits.stall:
            self._inquire(operation, "stall")
        if seconds > self.timeout:
            answers = operation.inquiry.answers
            if answers is not None or seconds > self.timeout + self._answer_seconds + STORE_SECONDS:
                self.fail(self._too_late(operation, answers or {}))

    def _inquire(self, operation: Operation, why: str) -> None:
        """Once for each reason."""
        question = f"{operation.number or f'transfer of {self.rank} at {operation.began}'}/{why}"
        if operation.inquiry is None or operation.inquiry.question != question:
            operation.inquiry = Inquiry(question, self._answer_seconds)
            watch().wake_runner()

    def _too_late(self, operation: Operation, answers: Mapping[int, Answer]) -> Failure:
        missing, mute = stall.absent(operation.number, self.rank, answers, self.size)
        late = sorted([*missing, *mute])
        who = stall.rank_list(late, self.names) if late else "the others"
        lines = [
            f"{who} did not come within {self.timeout:.1f} s",
            *self._report(operation, answers)[1:],
        ]
        return self._failure(
            "CollectiveTimeout", "\n".join(lines), self.names[late[0]] if late else None
        )

    def _report(self, operation: Operation, answers: Mapping[int, Answer]) -> list[str]:
        return stall.report(
            str(operation), operation.seconds, operation.number, self.rank, answers, self.names
        )

    def round(self) -> float:
        """Called by the runner: answer questions, and go on with our own."""
        self._questions.answer(self._answer)
        asking = False
        for operation in list(self._under_way.values()):
            inquiry = operation.inquiry
            if inquiry is not None and inquiry.answers is None:
                asking = True
                answers = inquiry.advance(self._questions, self.size)
                if inquiry.claimed and answers is not None and inquiry.question.endswith("stall"):
                    lines = self._report(operation, answers)
                    print("allstep: " + "\n".join(map(escaped, lines)), file=sys.stderr, flush=True)
        return min(0.2, self._every) if asking else self._every

    def _answer(self) -> Answer:
        doing = min(self._under_way.values(), key=lambda operation: operation.began, default=None)
        lines = main_threads_lines()
        if doing is None:
            return Answer(self._host, self.begun, "", time.monotonic() - self._active_at, lines)
        return Answer(
            self._host, self.begun, str(doing), doing.seconds, thread_lines(doing.thread) or lines
        )

    # The end

    def leave(self) -> None:
        """Called by the runner: the process ends, perhaps with an exception that nobody caught."""
        error = getattr(sys, "last_value", None)
        if error is None:
            self._record_leaving()
        elif self.failure is None:
            name = self.names[self.rank]
            reason = f"rank {name} is gone (it ended with {type(error).__name__}: {error})"
            self._records.write(self._failure("PeerLost", reason, name))
            self._records.record(self._failure("CommError", reason, blamed_rank(error, name)))

    def abandon(self) -> None:
        """The process ends now: nobody waits for the store any more."""
        store = root_of(self._store)
        if isinstance(store, WireStore):
            store.client.abandon()

    def _record_leaving(self) -> None:
        """Whoever sees our connections end shall know that we went in peace; a failure is told
        already."""
        if self.failure is None:
            name = self.names[self.rank]
            self._records.write(self._failure(_LEFT, f"rank {name} has left the group", name))

    def close(self, group: object) -> None:
        """The group is destroyed. group: the object that holds its Gloo groups besides us."""
        if self.size > 1:
            self._records.at_store(self._record_leaving)
            if watch().remove(self):
                dismiss()
        with self._failing:
            if self.failure is not None:
                destroy_later(self._gloos, group)
            for sockets, _ in self._connections:
                sockets.close()
            for owned in (self._gloos, self._connections, self._channels):
                owned.clear()
            self._lives.close()
