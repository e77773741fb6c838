"""The parts of the roster by themselves: options, slots, the order of ranks."""

import ast
from pathlib import Path

import pytest

from allstep.launch import roster
from allstep.launch.roster.elastic_policy import Policy
from allstep.launch.roster.form_plan import Candidates, order_by_rank, select, source_of
from allstep.launch.roster.living_workers import LivingWorker, Phase
from allstep.launch.roster.slots import Slots


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_workers": 2, "min_workers": 3}, "minimum of 3 workers is above their number 2"),
        (
            {"num_workers": 2, "min_workers": 1, "max_workers": 1},
            "maximum of 1 workers is below their number 2",
        ),
        ({"num_workers": 2, "min_workers": 0}, "each must be 1 or more"),
        ({"num_workers": 2, "min_workers": 1, "reset_limit": -1}, "reset limit of -1"),
        ({"num_workers": 2, "min_workers": 1, "cooldown_range": (0.5, 9)}, "range 0.5 9"),
        ({"num_workers": 2, "min_workers": 1, "cooldown_range": (9, 3601)}, "range 9 3601"),
        ({"num_workers": 2, "min_workers": 1, "cooldown_range": (9, 8)}, "range 9 8"),
    ],
)
def test_options_that_contradict_each_other(options: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Policy(**options)


def test_delays_double_up_to_a_minute() -> None:
    policy = Policy(1, 1)
    delays = [policy.delay_after(failures) for failures in (1, 2, 3, 6, 7, 8, 5000)]
    assert delays == [1.0, 2.0, 4.0, 32.0, 60.0, 60.0, 60.0]


def test_cool_downs_follow_horovods_formula() -> None:
    policy = Policy(1, 1, cooldown_range=(10.0, 100.0))
    for times, low, high in [(1, 20.0, 30.0), (2, 40.0, 50.0), (3, 80.0, 90.0), (4, 100.0, 100.0)]:
        assert low <= policy.cooldown_of("a", times) <= high
    assert policy.cooldown_of("a", 5000) == 100.0
    assert policy.cooldown_of("a", 1) != policy.cooldown_of("b", 1)
    assert Policy(1, 1).cooldown_of("a", 1) == float("inf")


def test_hosts_keep_the_order_of_their_discovery() -> None:
    slots = Slots(Policy(1, 1))
    slots.find([("b", 1), ("a", 1)])
    slots.find([("a", 1), ("c", 2)])
    slots.find([("c", 1), ("a", 1), ("b", 1)])
    assert slots.hosts == ["b", "a", "c"]
    assert slots.usable(0.0) == [("b", 0), ("a", 0), ("c", 0)]
    assert slots.free(0.0, {("a", 0)}) == [("b", 0), ("c", 0)]


def test_failures_of_a_slot() -> None:
    slots = Slots(Policy(1, 1, max_failures=2))
    slots.find([("a", 2)])
    slots.fail(("a", 0), 10.0)
    assert slots.free(10.9, set()) == [("a", 1)]
    assert list(slots.timers(set(), 10.9)) == [11.0, 0.0]
    slots.clear_failures(("a", 0))
    slots.fail(("a", 0), 20.0)
    assert slots.num_given_up == 0 and len(slots.usable(20.0)) == 2
    slots.fail(("a", 0), 30.0)
    assert (
        slots.num_given_up == 1 and slots.usable(30.0) == [("a", 1)] and slots.expected(30.0) == 1
    )
    assert slots.offers(("a", 0), 30.0), "a worker there could stay"


def test_an_excluded_host_is_expected_only_if_it_cools_down() -> None:
    for cooldown, expected, given_up in [((1.0, 60.0), 3, 0), (None, 1, 2)]:
        slots = Slots(Policy(1, 1, blacklist=True, cooldown_range=cooldown))
        slots.find([("a", 2), ("b", 1)])
        slots.blacklist("a", 5.0)
        assert (slots.expected(5.0), slots.num_given_up) == (expected, given_up)
        assert not slots.offers(("a", 0), 5.0)


def worker(
    number: int, host: str, slot: int = 0, updates: int = 5, holds: bool = True
) -> LivingWorker:
    return LivingWorker(number, (host, slot), 0.0, Phase.READY, updates, holds)


def test_ranks_of_a_host_are_consecutive_and_rank_0_holds_the_state() -> None:
    old = [worker(7, "b", 1), worker(3, "b", 0), worker(5, "c")]
    new = [worker(9, "a"), worker(10, "b", 2), worker(11, "d"), worker(12, "c", 1)]
    ranks = [each.number for each in order_by_rank(old, new, ["a", "b", "c", "d"])]
    assert ranks == [7, 3, 10, 5, 12, 9, 11]


def test_the_source_is_the_first_of_those_with_most_updates() -> None:
    ready = [worker(4, "a", updates=5), worker(2, "b", updates=6), worker(1, "b", 1, updates=6)]
    assert source_of(ready).number == 2


def test_select() -> None:
    def chosen(least: int, most: int | None, *withdrawn: str) -> list[list[int]] | None:
        ready = [worker(0, "a"), worker(1, "b", holds=False)]
        standby = [worker(2, "c"), worker(3, "d")]
        candidates = Candidates(
            ready, standby, lambda each: each.host not in withdrawn, ["a", "b", "c", "d"]
        )
        found = select(candidates, Policy(least, least, most))
        return found and [[each.number for each in part] for part in found]

    assert chosen(1, None) == [[0, 1], [2, 3]]
    assert chosen(4, None) == [[0, 1], [2, 3]]
    assert chosen(1, 3) == [[0, 1], [2]]
    assert chosen(1, 2) == [[0, 1], []]
    assert chosen(4, None, "d") is None
    assert chosen(1, None, "c") == [[0, 1], [3]]
    assert chosen(1, None, "a") == [[1, 0], [2, 3]], "it alone holds the state"
    assert chosen(1, None, "a", "b", "c") == [[0], [3]]
    assert chosen(1, None, "a", "b", "c", "d") is None
    assert chosen(2, 4, "b") == [[0], [2, 3]]


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


MODULES = sorted(Path(roster.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_clock_no_socket_and_no_process(path: Path) -> None:
    """Of `random`, it uses a generator with a seed."""
    pure = {"collections.abc", "dataclasses", "enum", "random", "signal", "typing"}
    names = ("", ".cause", ".run_events", ".run_state")
    below = {f"allstep.launch{name}" for name in names}
    own = {name for name in imports_of(path) if name.startswith("allstep.launch.roster")}
    assert imports_of(path) <= pure | below | own
    assert "random." not in path.read_text().replace("random.Random(f", "").replace("random()", "")
