"""Random faults: a sequence from the seed alone."""

from itertools import islice

from allstep.faults.random_sequence import sequence
from allstep.faults.spec import Fault, RandomFaults, parse


def first(text: str, size: int, count: int) -> list[Fault]:
    spec = parse(text)
    assert isinstance(spec, RandomFaults)
    return list(islice(sequence(spec, size), count))


def test_the_seed_decides() -> None:
    text = "random:kill,stop@every=15s,seed={}"
    assert first(text.format(3), 4, 50) == first(text.format(3), 4, 50)
    assert first(text.format(3), 4, 50) != first(text.format(4), 4, 50)


def test_the_sequence_of_a_seed_stays_the_same_in_later_versions() -> None:
    found = [
        (fault.seconds, fault.kind, fault.rank)
        for fault in first("random:kill,stop@every=15s,seed=3", 4, 3)
    ]
    assert found == [(20.353, "stop", 1), (31.987, "kill", 2), (43.217, "stop", 0)]


def test_times_kinds_and_ranks_are_spread() -> None:
    found = first("random:kill,stop:2@every=10", 3, 600)
    times = [fault.seconds or 0.0 for fault in found]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert all(4.99 <= gap <= 15.01 for gap in gaps)
    assert 9.5 < times[-1] / 600 < 10.5
    assert {(fault.kind, fault.value) for fault in found} == {("kill", None), ("stop", 2.0)}
    assert all(150 < sum(fault.rank == rank for fault in found) < 250 for rank in range(3))


def test_one_victim_does_not_change_times_and_kinds() -> None:
    anywhere = first("random:kill,hang@every=5,seed=1", 4, 20)
    on_one = first("random:kill,hang@every=5,seed=1,rank=2", 4, 20)
    assert {fault.rank for fault in on_one} == {2}
    assert [(f.seconds, f.kind) for f in anywhere] == [(f.seconds, f.kind) for f in on_one]
