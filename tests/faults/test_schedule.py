"""Which faults are due at which point."""

from allstep.faults.random_sequence import sequence
from allstep.faults.schedule import Planned, Schedule
from allstep.faults.spec import RandomFaults, parse, parse_all


def schedule(text: str, rank: int = 0, size: int = 2) -> Schedule:
    return Schedule(parse_all(text), rank, size)


def names(due: list[Planned]) -> list[str]:
    return [each.origin for each in due]


def test_a_fault_is_due_on_its_rank_only() -> None:
    assert names(schedule("kill@rank=1,step=1", rank=0).at_step(1)) == []
    assert names(schedule("kill@rank=1,step=1", rank=1).at_step(1)) == ["kill@rank=1,step=1"]
    assert names(schedule("kill@step=1", rank=0).at_step(1)) == ["kill@step=1"]


def test_most_kinds_are_due_once_and_some_in_every_step() -> None:
    plan = schedule("stop:1@step=3-5;nan@step=3-5;slow:2")
    assert [names(plan.at_step(step)) for step in range(2, 7)] == [
        ["slow:2"],
        ["stop:1@step=3-5", "nan@step=3-5", "slow:2"],
        ["nan@step=3-5", "slow:2"],
        ["nan@step=3-5", "slow:2"],
        ["slow:2"],
    ]


def test_a_run_that_resumes_within_a_range_is_hit() -> None:
    assert names(schedule("raise@step=3-5").at_step(4)) == ["raise@step=3-5"]
    assert names(schedule("raise@step=3").at_step(4)) == []


def test_without_a_trigger_it_is_the_first_step() -> None:
    plan = schedule("raise@rank=0")
    assert names(plan.at_step(7)) == ["raise@rank=0"]
    assert plan.at_step(8) == []


def test_a_phase_belongs_to_its_step() -> None:
    plan = schedule("kill@step=2,during=reduce;hang@during=update")
    assert plan.in_phase("update") == []
    assert plan.at_step(1) == [] and plan.in_phase("reduce") == []
    assert names(plan.in_phase("update")) == ["hang@during=update"]
    assert plan.at_step(2) == []
    assert names(plan.in_phase("reduce")) == ["kill@step=2,during=reduce"]
    assert plan.in_phase("update") == []


def test_forming_and_broadcast_belong_to_no_step() -> None:
    plan = schedule("kill@during=forming;raise@during=broadcast")
    assert names(plan.in_phase("forming")) == ["kill@during=forming"]
    assert plan.in_phase("forming") == []
    assert names(plan.in_phase("broadcast")) == ["raise@during=broadcast"]


def test_the_step_with_a_sample() -> None:
    plan = schedule("kill@sample=17")
    assert plan.at_step(1, [3, 4]) == []
    assert names(plan.at_step(2, [16, 17])) == ["kill@sample=17"]


def test_commits_writes_and_collectives_are_counted() -> None:
    plan = schedule("kill@commit=2;disk-full@commit=2-3;raise@op=3")
    assert [names(plan.at_commit()) for _ in range(3)] == [[], ["kill@commit=2"], []]
    full = ["disk-full@commit=2-3"]
    assert [names(plan.at_write()) for _ in range(4)] == [[], full, full, []]
    assert [names(plan.at_op()) for _ in range(4)] == [[], [], ["raise@op=3"], []]
    assert plan.counts_ops
    needed = ["hang@seconds=3", "random:raise,kill@every=3"]
    assert all(schedule(text).counts_ops for text in needed)
    others = ["kill@step=1", "kill@seconds=3", "flip@seconds=3", "random:kill,nan@every=3"]
    assert not any(schedule(text).counts_ops for text in others)
    assert plan.at_step(2) == []


def test_a_disk_without_a_commit_is_always_full() -> None:
    plan = schedule("disk-full")
    assert plan.at_commit() == [] and plan.at_step(1) == []
    assert [names(plan.at_write()) for _ in range(2)] == [["disk-full"]] * 2


def test_a_damaged_record_stays_damaged() -> None:
    plan = schedule("corrupt@sample=5")
    assert plan.at_step(1, [5]) == []
    assert [bool(plan.at_read(number)) for number in (4, 5, 5)] == [False, True, True]


def test_kinds_that_the_caller_cannot_carry_out_are_not_due() -> None:
    plan = schedule("flip@step=1-;raise@step=1")
    assert names(plan.at_step(1, unable=("flip",))) == ["raise@step=1"]
    assert names(plan.at_step(2)) == ["flip@step=1-"]


def test_moments_come_in_order() -> None:
    plan = schedule("kill@seconds=5;stop:1@seconds=2")
    assert plan.next_time == 2
    assert names(plan.at_time(1.9)) == []
    assert names(plan.at_time(2.0)) == ["stop:1@seconds=2"]
    assert plan.next_time == 5
    assert names(plan.at_time(9)) == ["kill@seconds=5"]
    assert plan.next_time is None and plan.at_step(1) == []


def test_every_rank_takes_its_part_of_a_random_sequence() -> None:
    text = "random:kill,stop@every=4,seed=5"
    spec = parse(text)
    assert isinstance(spec, RandomFaults)
    plans = [schedule(text, rank, 3) for rank in range(3)]
    found = [each.fault for plan in plans for each in plan.at_time(200)]
    whole = [fault for fault, _ in zip(sequence(spec, 3), range(len(found)), strict=False)]
    assert sorted(found, key=lambda fault: fault.seconds or 0.0) == whole
    assert all(plan.next_time is not None and plan.next_time > 200 for plan in plans)


def test_a_helper_process_keeps_its_own_kind() -> None:
    plan = schedule("kill@seconds=1;corrupt@sample=3;raise@step=1")
    plan.keep_only("corrupt")
    assert plan.next_time is None and plan.at_step(1) == []
    assert plan.at_read(3)
