"""The coordinator alone: every order of asks, against a model that knows only "all members have
asked"."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep.engine import messages
from allstep.engine.coordinator import Coordinator
from allstep.engine.request import Kind, Op, Request, decode, encode

WORLD = {0: (0, 1, 2)}


def ask(
    name: str, kind: Kind = Kind.ALLREDUCE, tensor: torch.Tensor | None = None, **more: Any
) -> bytes:
    return encode(Request(kind, tensor=torch.zeros(2) if tensor is None else tensor, **more), name)


def asked(coordinator: Coordinator, rank: int, *data: bytes) -> list[messages.Fields]:
    coordinator.take(rank, [messages.ASK, *data])
    return coordinator.answers()


def names_done(answers: Sequence[messages.Fields]) -> list[str]:
    return [
        decode(data).name for answer in answers if answer[0] == messages.DO for data in answer[1::2]
    ]


# What is ready, in every order


@st.composite
def programs(
    draw: st.DrawFn,
) -> tuple[dict[int, tuple[int, ...]], list[tuple[int, tuple[int, str]]]]:
    """Sets, and all asks of all members in some order."""
    size = draw(st.integers(1, 4))
    everyone = tuple(range(size))
    sets = {0: everyone}
    for number in range(1, draw(st.integers(1, 3))):
        sets[number] = tuple(sorted(draw(st.sets(st.sampled_from(everyone), min_size=1))))
    operations = [
        (draw(st.sampled_from(sorted(sets))), f"op{index}")
        for index in range(draw(st.integers(1, 6)))
    ]
    asks = [(rank, operation) for operation in operations for rank in sets[operation[0]]]
    return sets, draw(st.permutations(asks))


@given(programs(), st.integers(1, 5))
def test_each_operation_is_done_once_when_its_last_member_asks(program: Any, every: int) -> None:
    sets, asks = program
    coordinator = Coordinator(len(sets[0]), sets)
    missing = {operation: set(sets[operation[0]]) for _, operation in asks}
    expected, done = [], []
    for index, (rank, (number, name)) in enumerate(asks):
        coordinator.take(rank, [messages.ASK, ask(name, process_set=number)])
        missing[number, name].remove(rank)
        if not missing[number, name]:
            expected.append(name)
        if index % every == 0:
            done += names_done(coordinator.answers())
            assert sorted(done) == sorted(expected)
    done += names_done(coordinator.answers())
    assert sorted(done) == sorted(expected) == sorted({name for _, (_, name) in asks})
    assert coordinator.answers() == []


@given(st.data())
def test_groups_are_answered_whole(data: st.DataObject) -> None:
    """Ranks hand over groups that overlap; whatever was handed over together anywhere is answered
    together."""
    names = ["a", "b", "c", "d"]
    coordinator = Coordinator(2, {0: (0, 1)})
    posts: list[tuple[int, list[str]]] = []
    for rank in (0, 1):
        order = data.draw(st.permutations(names))
        cuts = sorted(data.draw(st.sets(st.integers(1, 3))))
        for begin, end in zip([0, *cuts], [*cuts, 4], strict=True):
            posts.append((rank, order[begin:end]))
    together = {name: {name} for name in names}
    for _, group in posts:
        merged = set().union(*(together[name] for name in group))
        for name in merged:
            together[name] = merged
    for rank, group in data.draw(st.permutations(posts)):
        batch = names_done(asked(coordinator, rank, *map(ask, group)))
        for name in batch:
            assert together[name] <= set(batch)
            names.remove(name)
    assert names == []


def test_a_second_ask_of_the_same_name_is_a_new_operation() -> None:
    coordinator = Coordinator(2, {0: (0, 1)})
    for shape in (2, 2, 5):  # a tensor may change its shape under an old name
        data = ask("x", tensor=torch.zeros(shape))
        assert asked(coordinator, 1, data) == []
        assert names_done(asked(coordinator, 0, data)) == ["x"]


# Ranks that ask for different things


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            {},
            {"tensor": torch.zeros(2).double()},
            "Mismatched data types: rank 0 had type float32, but rank 1",
        ),
        (
            {},
            {"kind": Kind.ALLGATHER},
            "Mismatched operations: rank 0 did an allreduce, but rank 1 did an allgather",
        ),
        (
            {},
            {"tensor": torch.zeros(17, 17)},
            (
                "Mismatched ALLREDUCE tensor shapes: rank 0 sent a tensor of shape [2], but rank 1"
                " sent a tensor of shape [17, 17]."
            ),
        ),
        (
            {"kind": Kind.BROADCAST},
            {"kind": Kind.BROADCAST, "tensor": torch.zeros(3)},
            "Mismatched BROADCAST tensor shapes",
        ),
        (
            {"kind": Kind.REDUCESCATTER},
            {"kind": Kind.REDUCESCATTER, "tensor": torch.zeros(3)},
            "Mismatched REDUCESCATTER tensor shapes",
        ),
        (
            {"kind": Kind.ALLGATHER},
            {"kind": Kind.ALLGATHER, "tensor": torch.zeros(2, 2)},
            "rank 0 sent a tensor of rank 1, but rank 1 sent a tensor of rank 2",
        ),
        (
            {"kind": Kind.ALLTOALL, "tensor": torch.zeros(2, 3)},
            {"kind": Kind.ALLTOALL, "tensor": torch.zeros(2, 4)},
            (
                "rank 0 sent a tensor with dimension 1 equal to 3, but rank 1 sent a tensor with"
                " dimension 1 equal to 4"
            ),
        ),
        ({}, {"prescale": 2.0}, "Mismatched prescale and/or postscale factors"),
        ({}, {"postscale": 2.0}, "Mismatched prescale and/or postscale factors"),
        (
            {},
            {"op": Op.MAX},
            "Mismatched reduction operations: rank 0 specified reduction operation AVERAGE",
        ),
        (
            {"kind": Kind.BROADCAST},
            {"kind": Kind.BROADCAST, "root": 1},
            (
                "Mismatched broadcast root ranks: rank 0 specified root rank 0, but rank 1"
                " specified root rank 1."
            ),
        ),
        # the first failure in Horovod's order wins
        ({}, {"tensor": torch.zeros(3).double(), "kind": Kind.ALLGATHER}, "Mismatched data types"),
        ({}, {"tensor": torch.zeros(3), "prescale": 2.0}, "tensor shapes"),
        ({}, {"prescale": 2.0, "op": Op.MAX}, "prescale and/or postscale"),
    ],
)
def test_differences_are_told_to_all(
    first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    coordinator = Coordinator(2, {0: (0, 1)})
    for _ in range(2):  # and remembered
        asked(coordinator, 0, ask("x", **first))
        (answer,) = asked(coordinator, 1, ask("x", **second))
        assert answer[:4] == [messages.REFUSE, b"0", b"x", messages.MISMATCH]
        assert words in answer[4].decode()
    asked(coordinator, 0, ask("x"))
    assert names_done(asked(coordinator, 1, ask("x"))) == ["x"]


def test_a_tensor_on_the_gpu_of_one_rank_only() -> None:
    coordinator = Coordinator(2, {0: (0, 1)})
    asked(coordinator, 0, ask("x"))
    (answer,) = asked(coordinator, 1, ask("x").replace(b"\tcpu\t", b"\tcuda\t"))
    assert (
        b"Mismatched CPU/GPU device selection: rank 0 specified device cpu, but rank 1" in answer[4]
    )


@pytest.mark.parametrize("kind", [Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER])
def test_a_tensor_without_rows(kind: Kind) -> None:
    coordinator = Coordinator(1, {0: (0,)})
    (answer,) = asked(coordinator, 0, ask("x", kind, torch.tensor(1.0)))
    assert answer[3] == messages.MISMATCH and b"rank zero" in answer[4]


def test_rows_and_splits_of_all_ranks_come_with_the_answer() -> None:
    coordinator = Coordinator(3, WORLD)
    for rank in range(3):
        answers = asked(coordinator, rank, ask("g", Kind.ALLGATHER, torch.zeros(rank, 2)))
    assert answers[0][2] == b"0,1,2"
    for rank in range(3):
        splits = (rank, 0, 1) if rank else None
        answers = asked(coordinator, rank, ask("t", Kind.ALLTOALL, torch.zeros(3), splits=splits))
    assert answers[0][2] == b"1,1,1;1,0,1;2,0,1"


# Join


def join(coordinator: Coordinator, rank: int) -> list[messages.Fields]:
    return asked(coordinator, rank, encode(Request(Kind.JOIN), "join.noname"))


def test_ranks_that_joined_are_not_waited_for() -> None:
    coordinator = Coordinator(3, WORLD)
    asked(coordinator, 0, ask("early"))
    asked(coordinator, 2, ask("early"))
    assert names_done(join(coordinator, 1)) == ["early"]
    assert asked(coordinator, 0, ask("late")) == []
    assert names_done(asked(coordinator, 2, ask("late"))) == ["late"]
    assert join(coordinator, 2) == []
    assert names_done(asked(coordinator, 0, ask("last"))) == ["last"]
    assert join(coordinator, 0) == [[messages.JOINED, b"0"]]
    assert asked(coordinator, 0, ask("after")) == []  # all are needed again
    assert asked(coordinator, 1, ask("after")) == []


def test_what_a_rank_asked_before_it_joined_counts() -> None:
    coordinator = Coordinator(2, {0: (0, 1)})
    asked(coordinator, 1, ask("x", tensor=torch.zeros(3)))
    join(coordinator, 1)
    (answer,) = asked(coordinator, 0, ask("x"))
    assert b"tensor shapes" in answer[4]


@pytest.mark.parametrize(
    "kind", [Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER, Kind.BARRIER]
)
def test_only_reductions_go_with_join(kind: Kind) -> None:
    coordinator = Coordinator(2, {0: (0, 1)})
    join(coordinator, 1)
    (answer,) = asked(coordinator, 0, ask("x", kind))
    assert f"{kind.name.lower()} is not supported with Join: rank 1 joined" in answer[4].decode()


def test_a_set_without_the_joined_rank_is_not_disturbed() -> None:
    coordinator = Coordinator(3, {**WORLD, 1: (0, 2)})
    join(coordinator, 1)
    asked(coordinator, 0, ask("x", Kind.ALLGATHER, process_set=1))
    assert names_done(asked(coordinator, 2, ask("x", Kind.ALLGATHER, process_set=1))) == ["x"]


# Notices


def notice(coordinator: Coordinator, rank: int, number: int, key: bytes = b"sgd") -> list[bytes]:
    coordinator.take(rank, [messages.NOTICE, key, b"%d" % number])
    return [answer[2] for answer in coordinator.answers() if answer[0] == messages.NOTICE]


def test_a_rank_that_joined_hears_of_each_step_once() -> None:
    coordinator = Coordinator(3, WORLD)
    assert notice(coordinator, 0, 4) == []
    assert notice(coordinator, 1, 3) == []
    answers = join(coordinator, 1)
    assert [answer for answer in answers if answer[0] == messages.NOTICE] == [
        [messages.NOTICE, b"sgd", b"4"]
    ]
    assert notice(coordinator, 2, 4) == []
    assert notice(coordinator, 0, 6) == [b"5", b"6"]
    assert notice(coordinator, 2, 6) == []
    assert notice(coordinator, 2, 1, b"adam") == [b"1"]
    assert join(coordinator, 2) == []
    assert notice(coordinator, 0, 7) == [b"7"]


# Fusion


def fused(coordinator: Coordinator, asks: Sequence[Sequence[bytes]]) -> list[list[str]]:
    for data in asks:
        coordinator.take(0, [messages.ASK, *data])
    return [[decode(data).name for data in answer[1::2]] for answer in coordinator.answers()]


def test_equal_ones_are_fused_over_others_up_to_the_threshold() -> None:
    alone = {0: (0,)}
    floats = [[ask(name)] for name in "abcde"]  # 8 bytes each
    mixed = [
        floats[0],
        [ask("int", tensor=torch.zeros(2).int())],
        *floats[1:],
        [ask("max", op=Op.MAX)],
    ]
    assert fused(Coordinator(1, alone), mixed) == [["a", "b", "c", "d", "e"], ["int"], ["max"]]
    assert fused(Coordinator(1, alone, fusion=16), mixed) == [
        ["a", "b"],
        ["int"],
        ["c", "d"],
        ["e"],
        ["max"],
    ]
    assert fused(Coordinator(1, alone, fusion=0), floats) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    broadcasts = [[ask(name, Kind.BROADCAST)] for name in "ab"]
    assert fused(Coordinator(1, alone), broadcasts) == [["a", "b"]]
    roots = [[ask(name, Kind.BROADCAST, root=root)] for root, name in enumerate("ab")]
    assert fused(Coordinator(1, alone), roots) == [["a"], ["b"]]
    large = [[ask(name, tensor=torch.empty(1 << 19))] for name in "ab"]
    assert fused(Coordinator(1, alone), large) == [["a"], ["b"]]


def test_groups_are_kept_apart_when_asked() -> None:
    groups = [[ask("a"), ask("b")], [ask("c"), ask("d")]]
    assert fused(Coordinator(1, {0: (0,)}), groups) == [["a", "b", "c", "d"]]
    assert fused(Coordinator(1, {0: (0,)}, fuse_groups=False), groups) == [["a", "b"], ["c", "d"]]


# Process sets


def change(coordinator: Coordinator, kind: Kind, *numbers: int) -> list[messages.Fields]:
    data = encode(
        Request(kind, splits=numbers),
        "process_set." + ("add" if kind is Kind.ADD_SET else "remove"),
    )
    answers = []
    for rank in range(coordinator.size):
        assert answers == []
        answers = asked(coordinator, rank, data)
    return answers


def test_numbers_of_sets_are_reused_in_the_order_in_which_they_were_freed() -> None:
    coordinator = Coordinator(4, {0: (0, 1, 2, 3)})
    for number, ranks in enumerate([(0,), (1,), (2,)], 1):
        assert change(coordinator, Kind.ADD_SET, *ranks) == [
            [messages.ADD, b"%d" % number, b"%d" % ranks[0]]
        ]
    for number in (2, 1):
        assert change(coordinator, Kind.REMOVE_SET, number) == [[messages.REMOVE, b"%d" % number]]
    assert change(coordinator, Kind.ADD_SET, 0, 1) == [[messages.ADD, b"2", b"0,1"]]
    assert change(coordinator, Kind.ADD_SET, 0, 2) == [[messages.ADD, b"1", b"0,2"]]
    assert change(coordinator, Kind.ADD_SET, 0, 3) == [[messages.ADD, b"4", b"0,3"]]
    (answer,) = change(coordinator, Kind.ADD_SET, 0, 3)
    assert (
        answer[3] == messages.VALUE
        and b"duplicate process set: [0, 3] is process set 4 already" in answer[4]
    )


def test_operations_of_a_removed_set_are_refused() -> None:
    coordinator = Coordinator(2, {0: (0, 1), 1: (0, 1)})
    asked(coordinator, 0, ask("x", process_set=1))
    refused, removed = change(coordinator, Kind.REMOVE_SET, 1)
    assert refused[:4] == [messages.REFUSE, b"1", b"x", messages.VALUE]
    assert removed == [messages.REMOVE, b"1"]
    (answer,) = asked(coordinator, 1, ask("x", process_set=1))
    assert b"process set 1 has been removed" in answer[4]


def test_ranks_that_add_different_sets() -> None:
    coordinator = Coordinator(2, {0: (0, 1)})
    asked(coordinator, 0, encode(Request(Kind.ADD_SET, splits=(0,)), "process_set.add"))
    (answer,) = asked(coordinator, 1, encode(Request(Kind.ADD_SET, splits=(1,)), "process_set.add"))
    assert b"Mismatched process sets: rank 0 gave [0], but rank 1 gave [1]." in answer[4]
    assert coordinator.sets == {0: (0, 1)}


# Those that do not come


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_missing_ranks_are_reported_every_so_often() -> None:
    clock = Clock()
    coordinator = Coordinator(3, WORLD, clock=clock)
    for index in range(8):
        asked(coordinator, 0, ask(f"x{index}"))
    asked(coordinator, 1, ask("x0"))
    clock.now = 59
    assert coordinator.stalls(60) == ""
    clock.now = 61
    first, *lines = coordinator.stalls(60).split("\n")
    assert "more than 60 seconds" in first and "deadlock" in first and "shutdown" not in first
    assert lines == [
        "Missing ranks:",
        "1: [x1, x2, x3, x4, x5, x6, ...]",
        "2: [x0, x1, x2, x3, x4, x5, ...]",
    ]
    clock.now = 90
    assert coordinator.stalls(60) == ""
    clock.now = 122
    assert coordinator.stalls(60) != ""


def test_a_stall_can_stop_everything() -> None:
    clock = Clock()
    coordinator = Coordinator(3, WORLD, clock=clock)
    asked(coordinator, 0, ask("old"))
    asked(coordinator, 1, ask("old"))
    clock.now = 30
    asked(coordinator, 2, ask("new"))
    clock.now = 41
    assert "shutdown" not in coordinator.stalls(10, 60)
    clock.now = 61
    report = coordinator.stalls(10, 60)
    assert report.split("\n")[-3:] == ["0: [new]", "1: [new]", "2!: [old]"]
    assert "Will shutdown" in report
    (answer,) = coordinator.answers()
    assert answer[:3] == [messages.STOP, b"EngineStopped", report.encode()]
    assert asked(coordinator, 2, ask("old")) == []  # nothing is answered any more


def test_an_operation_that_waits_too_long_is_an_error() -> None:
    clock = Clock()
    coordinator = Coordinator(3, WORLD, clock=clock)
    asked(coordinator, 1, ask("x"))
    clock.now = 9.9
    coordinator.expire(10)
    assert coordinator.answers() == []
    clock.now = 10.1
    coordinator.expire(10)
    assert coordinator.answers() == [
        [
            messages.STOP,
            b"CollectiveTimeout",
            b"x: rank 0, rank 2 did not request it within 10.0 s",
            b"0",
        ]
    ]


def test_a_group_that_waits_too_long_is_named_by_what_is_missing() -> None:
    """The first operation of the group has been requested by all ranks."""
    clock = Clock()
    coordinator = Coordinator(2, {0: (0, 1)}, clock=clock)
    asked(coordinator, 0, ask("x"), ask("y"))
    asked(coordinator, 1, ask("x"))
    clock.now = 10.1
    coordinator.expire(10)
    ((*_, text, rank),) = coordinator.answers()
    assert (text, rank) == (b"y: rank 1 did not request it within 10.0 s", b"1")


def test_what_was_ready_is_answered_before_the_stop() -> None:
    coordinator = Coordinator(1, {0: (0,)})
    coordinator.take(0, [messages.ASK, ask("x")])
    coordinator.take(0, [messages.STOP, b"EngineStopped", b"over", b""])
    coordinator.take(0, [messages.ASK, ask("y")])
    first, second = coordinator.answers()
    assert names_done([first]) == ["x"] and second[0] == messages.STOP
