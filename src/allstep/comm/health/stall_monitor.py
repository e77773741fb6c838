"""Reports operations that stall, and ends those that exceed the group's timeout.

The guard passes its oldest operation to `check`, in the watch thread, which must not block. What
talks to the store (`stall_inquiry`) is done by `round`, in the runner thread:

```
seconds waited          check (watch thread)                  round (runner thread)
> ALLSTEP_STALL_SECONDS  starts an inquiry "stall"            asks, collects the answers; one rank
                                                              prints the report
shortly before timeout   starts an inquiry "last"             asks, collects the answers
> timeout                returns the failure, as soon as the answers are complete or overdue
```
"""

import sys
import time
import weakref
from collections.abc import Mapping
from typing import Protocol

from torch._C._distributed_c10d import Store

from allstep.comm.health import stall_inquiry
from allstep.comm.health.failure import Failure, Operation
from allstep.comm.health.failure_records import STORE_SECONDS
from allstep.comm.health.stack_lines import main_threads_lines, thread_lines
from allstep.comm.health.stall_inquiry import Answer, Inquiry, Questions
from allstep.comm.health.threads import watch
from allstep.console.escape import escaped


class WaitingGroup(Protocol):
    """The state of a group that a stall monitor reads; implemented by `Guard`."""

    rank: int
    size: int
    timeout: float
    """Seconds after which a waiting operation is an error."""
    names: list[int]
    """The ranks of the group as the user counts them."""
    begun: int
    """The number of collectives that this rank has called on the group."""
    under_way: dict[int, Operation]
    """The operations that threads of this rank wait for."""
    active_at: float
    """When this rank last called a collective or ended a wait, on the monotonic clock."""


class StallMonitor:
    """Finds out which ranks a long operation waits for.

    `store` is the part of the store that belongs to this group alone. `host` is the name of our
    host in reports. `stall_seconds` is the wait after which a report is printed.
    """

    def __init__(self, group: WaitingGroup, store: Store, host: str, stall_seconds: float) -> None:
        # The group owns this object: a strong reference back would keep both until a collection.
        self._group: WaitingGroup = weakref.proxy(group)
        self._host, self._stall_seconds = host, stall_seconds
        self._questions = Questions(store, group.rank, group.size)

    @property
    def _every(self) -> float:
        """Seconds between checks for new questions."""
        return min(5.0, self._stall_seconds / 4, self._group.timeout / 4)

    @property
    def _answer_seconds(self) -> float:
        """Seconds within which a rank that is able to answer a question does so."""
        return 1.5 * self._every + 0.2

    def check(self, operation: Operation) -> Failure | None:
        """Return the failure of an operation that exceeds the timeout; inquire before that."""
        seconds, timeout = operation.seconds, self._group.timeout
        if seconds > timeout - self._answer_seconds:
            self._inquire(operation, "last")
        elif seconds > self._stall_seconds:
            self._inquire(operation, "stall")
        if seconds > timeout:
            answers = operation.inquiry.answers
            if answers is not None or seconds > timeout + self._answer_seconds + STORE_SECONDS:
                return self._too_late(operation, answers or {})
        return None

    def _inquire(self, operation: Operation, why: str) -> None:
        """Start an inquiry about the missing ranks, once for each reason."""
        transfer = f"transfer of {self._group.rank} at {operation.began}"
        question = f"{operation.number or transfer}/{why}"
        if operation.inquiry is None or operation.inquiry.question != question:
            operation.inquiry = Inquiry(question, self._answer_seconds)
            watch().wake_runner()

    def _too_late(self, operation: Operation, answers: Mapping[int, Answer]) -> Failure:
        group = self._group
        missing, mute = stall_inquiry.absent(operation.number, group.rank, answers, group.size)
        late = sorted([*missing, *mute])
        who = stall_inquiry.rank_list(late, group.names) if late else "the others"
        lines = [
            f"{who} did not arrive within {group.timeout:.1f} s",
            *self._report(operation, answers)[1:],
        ]
        peer = group.names[late[0]] if late else None
        return Failure("CollectiveTimeout", "\n".join(lines), peer, group.names[group.rank])

    def _report(self, operation: Operation, answers: Mapping[int, Answer]) -> list[str]:
        rank, names = self._group.rank, self._group.names
        return stall_inquiry.report(
            str(operation), operation.seconds, operation.number, rank, answers, names
        )

    def round(self) -> float:
        """Answer questions and advance our own inquiries; return seconds until the next call.

        May block, as the store may.
        """
        self._questions.answer(self._answer)
        asking = False
        for operation in list(self._group.under_way.values()):
            inquiry = operation.inquiry
            if inquiry is not None and inquiry.answers is None:
                asking = True
                answers = inquiry.advance(self._questions, self._group.size)
                if inquiry.claimed and answers is not None and inquiry.question.endswith("stall"):
                    lines = self._report(operation, answers)
                    print("allstep: " + "\n".join(map(escaped, lines)), file=sys.stderr, flush=True)
        return min(0.2, self._every) if asking else self._every

    def _answer(self) -> Answer:
        group, host = self._group, self._host
        doing = min(group.under_way.values(), key=lambda operation: operation.began, default=None)
        lines = main_threads_lines()
        if doing is None:
            return Answer(host, group.begun, "", time.monotonic() - group.active_at, lines)
        lines = thread_lines(doing.thread) or lines
        return Answer(host, group.begun, str(doing), doing.seconds, lines)
