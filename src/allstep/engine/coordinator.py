"""The coordinator: requests of all ranks in, responses in one order for all ranks out.

It has no threads, no network and no tensors.

There is one coordinator for the whole world, on rank 0. Its answers form a log. Every rank reads
the log from beginning to end and executes the answers that concern it, in that order. So operations
of several process sets cannot deadlock, whatever the order of the requests.

An operation is ready when all members of its process set have requested it. Ranks that have joined
(they have no more data) are not waited for. The requests are then compared (`mismatch`), and the
answer is to run the operation, or the reason for refusing it. Requests that were submitted as a
group are answered together.
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
from allstep.engine.request import Key, Kind, RequestSpec, decode

_FUSED = (Kind.ALLREDUCE, Kind.ADASUM, Kind.REDUCESCATTER, Kind.ALLGATHER, Kind.BROADCAST)
# Bytes. A larger tensor gains nothing from fusion, which would copy it twice.
_WORTH_FUSING = 1 << 20
_MAX_VERDICTS = 10_000
_MAX_NAMES = 6


@dataclass(slots=True)
class _Group:
    """Operations that are answered together, because some rank submitted them as one group."""

    keys: dict[Key, None]
    number: int


@dataclass(slots=True)
class _Waiting:
    """An operation that some ranks have requested; `specs` holds the requests by rank."""

    key: Key
    began: float
    specs: dict[int, RequestSpec] = field(default_factory=dict)
    group: _Group | None = None


class _Ready(NamedTuple):
    """An operation that all ranks have requested and that can run."""

    verdict: Verdict
    group: _Group | None


class Coordinator:
    """Decides which operations run, and in which order.

    `size`: number of ranks. `sets`: the ranks of each process set by its number; `add` and `remove`
    messages change it. `fusion`: maximum bytes of fused operations. `fuse_groups`: whether
    operations of different groups may be fused. `clock`: monotonic seconds.
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
        # A dict, since it keeps the order of joining.
        self.joined: dict[int, None] = {}
        self.fusion, self.fuse_groups = fusion, fuse_groups
        self.stopped = False
        self._clock = clock
        self._waiting: dict[Key, _Waiting] = {}
        self._due: list[_Ready | Fields] = []
        self._verdicts: dict[tuple[RequestSpec, ...], Verdict] = {}
        self._free_ids: deque[int] = deque()
        self._num_groups = 0
        # The last step of each rank, by the key of the steps.
        self._steps: dict[bytes, list[int]] = {}
        self._warned_at: float | None = None

    # From the ranks

    @property
    def is_waiting(self) -> bool:
        """Whether some ranks have requested an operation and others have not."""
        return bool(self._waiting)

    def take(self, rank: int, fields: Fields) -> None:
        """Process a message from a rank; ignore it after a stop."""
        what = fields[0]
        if self.stopped:
            return
        if what == ASK:
            self._take_requests(rank, fields)
        elif what == NOTICE:
            self._noticed(rank, fields[1], int(fields[2]))
        else:
            self.stopped = True
            self._due.append(fields)

    def _take_requests(self, rank: int, fields: Fields) -> None:
        if len(fields) == 2:
            waiting = self._take_request(rank, decode(fields[1]))
            if waiting is not None:
                self._settle(waiting)
            return
        together = [self._take_request(rank, decode(data)) for data in fields[1:]]
        group = [waiting for waiting in together if waiting is not None]
        self._bind(group)
        for waiting in group:
            self._settle(waiting)

    def _take_request(self, rank: int, spec: RequestSpec) -> _Waiting | None:
        if spec.kind is Kind.JOIN:
            self._join(rank)
            return None
        key = spec.key
        waiting = self._waiting.get(key)
        if waiting is None:
            if spec.process_set not in self.sets:
                self._refuse(key, VALUE, f"process set {spec.process_set} has been removed")
                return None
            waiting = self._waiting[key] = _Waiting(key, self._clock())
        waiting.specs[rank] = spec
        return waiting

    def _bind(self, together: Sequence[_Waiting]) -> None:
        """Merge operations, and the groups that they already belong to, into one group."""
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
        """Answer an operation if it and all operations of its group are ready."""
        if waiting.key not in self._waiting or not self._is_ready(waiting):
            return
        if waiting.group is None:
            self._answer(waiting)
        elif all(self._is_ready(self._waiting[key]) for key in waiting.group.keys):
            for key in waiting.group.keys:
                self._answer(self._waiting[key])

    def _is_ready(self, waiting: _Waiting) -> bool:
        members = self.sets[waiting.key[0]]
        if len(waiting.specs) == len(members):
            return True
        return bool(self.joined) and all(
            rank in waiting.specs or rank in self.joined for rank in members
        )

    def _answer(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.key]
        verdict = self._verdict(waiting)
        if verdict.refusal:
            self._refuse(waiting.key, MISMATCH, verdict.refusal)
        elif verdict.spec.kind is Kind.ADD_SET:
            self._add_set(waiting.key, verdict.spec.splits)
        elif verdict.spec.kind is Kind.REMOVE_SET:
            self._remove_set(verdict.spec.splits[0])
        else:
            self._due.append(_Ready(verdict, waiting.group))

    def _verdict(self, waiting: _Waiting) -> Verdict:
        """Compare the requests of an operation; known combinations come from a cache."""
        members = self.sets[waiting.key[0]]
        ranks = [rank for rank in members if rank in waiting.specs]
        specs = tuple(waiting.specs[rank] for rank in ranks)
        verdict = None
        if len(specs) == len(members) and not self.joined:
            verdict = self._verdicts.get(specs)
        if verdict is None:
            joined = [rank for rank in members if rank in self.joined]
            verdict = judge(ranks, specs, joined)
            if not joined:
                if len(self._verdicts) >= _MAX_VERDICTS:
                    self._verdicts.clear()
                self._verdicts[specs] = verdict
        return verdict

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
        """Send joined ranks the steps that other ranks have begun without them."""
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
        """Return and remove the messages that all ranks must execute next, in this order.

        Operations that are ready at the same time may be fused.
        """
        if not self._due:
            return []
        due, self._due = self._due, []
        return self._fuse(due)

    def _fuse(self, due: Iterable[_Ready | Fields]) -> list[Fields]:
        """Put each operation into the first answer that is alike and has room left.

        An operation may thus run before others that became ready earlier.
        """
        answers: list[Fields] = []
        room: dict[tuple[object, ...], tuple[list[bytes], int]] = {}
        for each in due:
            if not isinstance(each, _Ready):
                answers.append(each)
                if each[0] != REFUSE:
                    # The process sets may change here, so no operation moves past it.
                    room.clear()
                continue
            verdict, group = each
            like = self._fusable(verdict, group)
            answer, left = room.get(like, ([], 0)) if like else ([], 0)
            if not answer or left < verdict.nbytes:
                answer, left = [DO], self.fusion
                answers.append(answer)
            answer += [verdict.spec.data, verdict.more]
            if like:
                room[like] = answer, left - verdict.nbytes
        return answers

    def _fusable(self, verdict: Verdict, group: _Group | None) -> tuple[object, ...]:
        """Return the values that fused operations must share; empty if this one is not fused."""
        spec = verdict.spec
        if spec.kind not in _FUSED or verdict.nbytes > min(_WORTH_FUSING, self.fusion):
            return ()
        bound = 0 if self.fuse_groups or group is None else group.number
        return (
            spec.kind,
            spec.process_set,
            spec.dtype,
            spec.device,
            spec.op,
            spec.prescale,
            spec.postscale,
            spec.root,
            bound,
        )

    # Late ranks

    def expire(self, seconds: float) -> None:
        """Stop all engines if an operation has waited for more than `seconds`."""
        now = self._clock()
        late_ones = [each for each in self._waiting.values() if now - each.began > seconds]
        if late_ones:
            # In a group, all wait for those that some rank has not requested: name one of these.
            old = next((each for each in late_ones if self._missing(each)), late_ones[0])
            missing = self._missing(old)
            late = ", ".join(f"rank {rank}" for rank in missing) or "other ranks of its group"
            text = f"{old.key[1]}: {late} did not request it within {seconds:.1f} s"
            self.take(0, [STOP, b"CollectiveTimeout", text.encode(), joined_text(missing[:1])])

    def stalls(self, warn_after: float, stop_after: float = 0.0) -> str:
        """Return a report on operations that some ranks have not requested; "" if there is none.

        Covers operations that have waited for `warn_after` seconds; reports are at least
        `warn_after` seconds apart. After `stop_after` seconds, stop all engines; 0 means never.
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
        return [rank for rank in members if rank not in waiting.specs and rank not in self.joined]


def stall_report(
    stalled: Sequence[tuple[str, Sequence[int]]], seconds: float, stopping: Iterable[int]
) -> str:
    """Describe which ranks have not requested which operations, for the user.

    `stalled`: name and missing ranks of each operation. `stopping`: ranks that cause a stop.
    """
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
        shown = names[rank][:_MAX_NAMES] + ["..."] * (len(names[rank]) > _MAX_NAMES)
        lines.append(f"{rank}{'!' if rank in final else ''}: [{', '.join(shown)}]")
    return "\n".join(lines)
