"""The coordinator: requests of the ranks in, responses in one order for all of them out. No
threads, no network, no tensors.

There is one for the whole world, on rank 0. Its answers form a log that every rank reads from the
beginning to the end, and every rank does what concerns it in that order. So operations of several
sets cannot wait for each other in a circle, whatever order the ranks asked in.

An operation is ready when all members of its set have asked for it; ranks that have joined (they
have no more data) are not waited for. Then the asks are compared (`mismatch`), and the answer is to
carry it out, or why not. Asks that were handed over as a group are answered together.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from allstep.engine.messages import (
    ADD,
    ASK,
    DO,
    JOINED,
    JOINING,
    MISMATCH,
    NOTICE,
    REFUSE,
    REMOVE,
    STOP,
    VALUE,
    Fields,
)
from allstep.engine.mismatch import Verdict, joined_text, judge
from allstep.engine.request import Ask, Key, Kind, decode

_FUSED = (Kind.ALLREDUCE, Kind.ADASUM, Kind.REDUCESCATTER, Kind.ALLGATHER)
_WORTH_FUSING = (
    1 << 20
)  # bytes; what is larger gains nothing from being packed with others, and is copied twice for it
_MOST_VERDICTS = 10_000
_MOST_NAMES = 6


@dataclass(slots=True)
class _Group:
    """Operations that are answered together: on some rank they were handed over as one."""

    keys: dict[Key, None]
    number: int


@dataclass(slots=True)
class _Waiting:
    """An operation for which some ranks have asked."""

    key: Key
    began: float
    asks: dict[int, Ask] = field(default_factory=dict)  # by rank
    group: _Group | None = None


class _Ready(NamedTuple):
    """An operation that can be done."""

    verdict: Verdict
    group: _Group | None


class Coordinator:
    """See the module.

    sets: the ranks of each process set; changed by `add` and `remove`. fusion: bytes up to which
    ready operations are fused. fuse_groups: whether operations of different groups may be fused.
    """

    def __init__(
        self,
        size: int,
        sets: dict[int, tuple[int, ...]],
        fusion: int = 128 << 20,
        fuse_groups: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self.sets = dict(sets)
        self.joined: dict[int, None] = {}  # in the order of joining
        self.fusion, self.fuse_groups = fusion, fuse_groups
        self.stopped = False
        self._clock = clock
        self._waiting: dict[Key, _Waiting] = {}
        self._due: list[_Ready | Fields] = []
        self._verdicts: dict[tuple[Ask, ...], Verdict] = {}
        self._free_ids: deque[int] = deque()
        self._num_groups = 0
        self._steps: dict[bytes, list[int]] = {}  # key -> the last step of each rank
        self._warned_at: float | None = None

    # From the ranks

    @property
    def is_waiting(self) -> bool:
        """Whether some ranks have asked for an operation and others have not."""
        return bool(self._waiting)

    def take(self, rank: int, fields: Fields) -> None:
        """What a rank says."""
        what = fields[0]
        if self.stopped:
            return
        if what == ASK:
            self._asked(rank, fields)
        elif what == NOTICE:
            self._noticed(rank, fields[1], int(fields[2]))
        else:
            self.stopped = True
            self._due.append(fields)

    def _asked(self, rank: int, fields: Fields) -> None:
        if len(fields) == 2:
            waiting = self._note(rank, decode(fields[1]))
            if waiting is not None:
                self._settle(waiting)
            return
        together = [self._note(rank, decode(data)) for data in fields[1:]]
        group = [waiting for waiting in together if waiting is not None]
        self._bind(group)
        for waiting in group:
            self._settle(waiting)

    def _note(self, rank: int, ask: Ask) -> _Waiting | None:
        if ask.kind is Kind.JOIN:
            self._join(rank)
            return None
        key = ask.key
        waiting = self._waiting.get(key)
        if waiting is None:
            if ask.process_set not in self.sets:
                self._refuse(key, VALUE, f"process set {ask.process_set} has been removed")
                return None
            waiting = self._waiting[key] = _Waiting(key, self._clock())
        waiting.asks[rank] = ask
        return waiting

    def _bind(self, together: Sequence[_Waiting]) -> None:
        """Make one group of these, and of all that they were bound to before."""
        group = next((waiting.group for waiting in together if waiting.group is not None), None)
        if group is not None and all(waiting.group is group for waiting in together):
            return
        if group is None:
            self._num_groups += 1
            group = _Group({}, self._num_groups)
        for waiting in together:
            keys = waiting.group.keys if waiting.group is not None else (waiting.key,)
            for key in list(keys):
                group.keys[key] = None
                self._waiting[key].group = group

    def _settle(self, waiting: _Waiting) -> None:
        """Answer an operation if all have come, and if all of its group are ready with it."""
        if waiting.key not in self._waiting or not self._is_ready(waiting):
            return
        if waiting.group is None:
            self._answer(waiting)
        elif all(self._is_ready(self._waiting[key]) for key in waiting.group.keys):
            for key in waiting.group.keys:
                self._answer(self._waiting[key])

    def _is_ready(self, waiting: _Waiting) -> bool:
        members = self.sets[waiting.key[0]]
        if len(waiting.asks) == len(members):
            return True
        return bool(self.joined) and all(
            rank in waiting.asks or rank in self.joined for rank in members
        )

    def _answer(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.key]
        members = self.sets[waiting.key[0]]
        asks = tuple(waiting.asks[rank] for rank in members if rank in waiting.asks)
        verdict = (
            self._verdicts.get(asks) if len(asks) == len(members) and not self.joined else None
        )
        if verdict is None:
            joined = [rank for rank in members if rank in self.joined]
            verdict = judge([rank for rank in members if rank in waiting.asks], asks, joined)
            if not joined:
                if len(self._verdicts) >= _MOST_VERDICTS:
                    self._verdicts.clear()
                self._verdicts[asks] = verdict
        if verdict.refusal:
            self._refuse(waiting.key, MISMATCH, verdict.refusal)
        elif verdict.ask.kind is Kind.ADD_SET:
            self._add_set(waiting.key, verdict.ask.splits)
        elif verdict.ask.kind is Kind.REMOVE_SET:
            self._remove_set(verdict.ask.splits[0])
        else:
            self._due.append(_Ready(verdict, waiting.group))

    def _refuse(self, key: Key, kind: bytes, why: str) -> None:
        self._due.append([REFUSE, b"%d" % key[0], key[1].encode(), kind, why.encode()])

    # Joining

    def _join(self, rank: int) -> None:
        if not self.joined:
            self._due.append([JOINING])
        self.joined[rank] = None
        if len(self.joined) == self.size:
            self.joined.clear()
            self._due.append([JOINED, b"%d" % rank])
            return
        for waiting in list(self._waiting.values()):
            self._settle(waiting)
        for key in self._steps:
            self._remind(key)

    def _noticed(self, rank: int, key: bytes, number: int) -> None:
        steps = self._steps.setdefault(key, [0] * self.size)
        steps[rank] = max(steps[rank], number)
        if self.joined:
            self._remind(key)

    def _remind(self, key: bytes) -> None:
        """Tell the ranks that have joined of the steps that others have begun without them."""
        steps = self._steps[key]
        behind = [rank for rank in self.joined if steps[rank] < max(steps)]
        if behind:
            for number in range(min(steps[rank] for rank in behind) + 1, max(steps) + 1):
                self._due.append([NOTICE, key, b"%d" % number])
            for rank in behind:
                steps[rank] = max(steps)

    # Process sets

    def _add_set(self, key: Key, ranks: tuple[int, ...]) -> None:
        same = next((number for number, known in self.sets.items() if known == ranks), None)
        if same is not None:
            self._refuse(
                key, VALUE, f"duplicate process set: {list(ranks)} is process set {same} already"
            )
            return
        number = self._free_ids.popleft() if self._free_ids else max(self.sets) + 1
        self.sets[number] = ranks
        self._due.append([ADD, b"%d" % number, joined_text(ranks)])

    def _remove_set(self, number: int) -> None:
        for key in [key for key in self._waiting if key[0] == number]:
            del self._waiting[key]
            self._refuse(key, VALUE, f"process set {number} has been removed")
        del self.sets[number]
        self._free_ids.append(number)
        self._due.append([REMOVE, b"%d" % number])

    # To the ranks

    def answers(self) -> list[Fields]:
        """What all ranks are to do next, in this order.

        Operations that are ready at the same time may be fused.
        """
        if not self._due:
            return []
        due, self._due = self._due, []
        return self._fuse(due)

    def _fuse(self, due: Iterable[_Ready | Fields]) -> list[Fields]:
        """Pack what fits together into the first answer in which there is room; the others may be
        skipped for it."""
        answers: list[Fields] = []
        room: dict[tuple[object, ...], tuple[list[bytes], int]] = {}
        for each in due:
            if not isinstance(each, _Ready):
                answers.append(each)
                if each[0] != REFUSE:
                    room.clear()  # sets may change here: nothing moves past it
                continue
            verdict, group = each
            like = self._fusable(verdict, group)
            answer, left = room.get(like, ([], 0)) if like else ([], 0)
            if not answer or left < verdict.nbytes:
                answer, left = [DO], self.fusion
                answers.append(answer)
            answer += [verdict.ask.data, verdict.more]
            if like:
                room[like] = answer, left - verdict.nbytes
        return answers

    def _fusable(self, verdict: Verdict, group: _Group | None) -> tuple[object, ...]:
        """What must be equal for two operations to be fused; empty when this one is not."""
        ask = verdict.ask
        if ask.kind not in _FUSED or verdict.nbytes > min(_WORTH_FUSING, self.fusion):
            return ()
        bound = 0 if self.fuse_groups or group is None else group.number
        return (
            ask.kind,
            ask.process_set,
            ask.dtype,
            ask.device,
            ask.op,
            ask.prescale,
            ask.postscale,
            bound,
        )

    # Those that do not come

    def expire(self, seconds: float) -> None:
        """Stop everything when an operation has waited so long."""
        now = self._clock()
        old = next((each for each in self._waiting.values() if now - each.began > seconds), None)
        if old is not None:
            missing = self._missing(old)
            late = ", ".join(f"rank {rank}" for rank in missing) or "others of its group"
            text = f"{old.key[1]}: {late} did not come within {seconds:.1f} s"
            self.take(0, [STOP, b"CollectiveTimeout", text.encode(), joined_text(missing[:1])])

    def stalls(self, warn_after: float, stop_after: float = 0.0) -> str:
        """A report on operations that some ranks have not asked for in `warn_after` seconds; empty
        when there is nothing to report.

        Reports come at least `warn_after` seconds apart. stop_after: when an operation has waited
        so long, stop everything; 0 is never.
        """
        now = self._clock()
        old = [each for each in self._waiting.values() if now - each.began > warn_after]
        too_old = [each for each in old if stop_after and now - each.began > stop_after]
        recent = self._warned_at is not None and now - self._warned_at < warn_after
        if not old or self.stopped or (recent and not too_old):
            return ""
        self._warned_at = now
        report = stall_report(
            [(each.key[1], self._missing(each)) for each in old],
            warn_after,
            {rank for each in too_old for rank in self._missing(each)},
        )
        if too_old:
            self.take(0, [STOP, b"EngineStopped", report.encode(), b""])
        return report

    def _missing(self, waiting: _Waiting) -> list[int]:
        members = self.sets[waiting.key[0]]
        return [rank for rank in members if rank not in waiting.asks and rank not in self.joined]


def stall_report(
    stalled: Sequence[tuple[str, Sequence[int]]], seconds: float, stopping: Iterable[int]
) -> str:
    """For people: which ranks are missing in which operations. stopping: ranks because of which
    everything stops."""
    names: dict[int, list[str]] = {}
    for name, missing in stalled:
        for rank in missing:
            names.setdefault(rank, []).append(name)
    final = set(stopping)
    lines = [
        "One or more tensors were submitted by some ranks and have waited for the others for more"
        f" than {seconds:.0f} seconds. Different ranks may be submitting different tensors, or only"
        " some of the ranks submit them, which will cause deadlock."
    ]
    if final:
        lines[0] += " Will shutdown."
    lines.append("Missing ranks:")
    for rank in sorted(names):
        shown = names[rank][:_MOST_NAMES] + ["..."] * (len(names[rank]) > _MOST_NAMES)
        lines.append(f"{rank}{'!' if rank in final else ''}: [{', '.join(shown)}]")
    return "\n".join(lines)
