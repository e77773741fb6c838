"""The text of a fault: it round-trips, and a wrong one is one line with the nearest valid name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.errors import ConfigError
from allstep.faults.kinds import KINDS, PHASES, SINGLE_PHASES, TRIGGERS
from allstep.faults.spec import Fault, RandomFaults, Span, check, join, parse, parse_all


@st.composite
def spans(draw: st.DrawFn) -> Span:
    first = draw(st.integers(1, 10**6))
    return Span(first, draw(st.none() | st.integers(first, 10**7)))


PLACES: dict[str, st.SearchStrategy[Any]] = {
    "step": spans(),
    "commit": spans(),
    "op": st.integers(1, 10**6),
    "seconds": st.floats(0, 10**6),
    "sample": st.integers(0, 10**9),
}


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    name = draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[name]
    value: float | None = None
    if kind.value is not None:
        low, high = kind.value.low, kind.value.high
        numbers = st.integers(int(low), int(high)) if kind.value.whole else st.floats(low, high)
        value = draw(numbers)
    given: dict[str, Any] = {"rank": draw(st.none() | st.integers(0, 99))}
    triggers = [place for place in TRIGGERS if place in kind.places]
    during = draw(st.none() | st.sampled_from(PHASES)) if "during" in kind.places else None
    if during is not None:
        triggers = [] if during in SINGLE_PHASES else ["step", "sample"]
    if name == "corrupt" or (triggers and draw(st.booleans())):
        place = draw(st.sampled_from(triggers))
        given[place] = draw(PLACES[place])
    return Fault(name, value, during=during, **given)


@given(faults())
def test_a_fault_is_what_its_text_means(fault: Fault) -> None:
    assert parse(str(fault)) == fault


@given(
    st.lists(st.sampled_from(["kill", "exit:3", "stop:2.5", "hang", "flip"]), min_size=1),
    st.floats(0.1, 1e6),
    st.integers(0, 10**9),
    st.none() | st.integers(0, 9),
)
def test_random_faults_are_what_their_text_means(
    kinds: list[str], every: float, seed: int, rank: int | None
) -> None:
    choices = tuple(parse(kind) for kind in kinds)
    spec = RandomFaults(choices, every, seed, rank)  # type: ignore[arg-type]
    assert parse(str(spec)) == spec


def complaint_about(text: str) -> str:
    try:
        parse_all(text)
    except ConfigError as error:
        return str(error)
    return ""


@given(st.text(max_size=40) | st.text("kilstepranom:;@=,-.0159", max_size=30))
def test_any_text_is_a_fault_or_one_line(text: str) -> None:
    assert len(complaint_about(text).splitlines()) <= 1


def test_the_examples_of_the_issue() -> None:
    assert parse("kill@rank=1,step=50") == Fault("kill", rank=1, step=Span(50, 50))
    assert parse("slow:3@rank=1") == Fault("slow", 3.0, rank=1)
    assert parse("step=50-90".join(["raise@", ""])) == Fault("raise", step=Span(50, 90))
    assert parse("random:kill,stop@every=15s,seed=3") == RandomFaults(
        (Fault("kill"), Fault("stop", 1)), 15.0, 3
    )
    assert parse("kill@step=50-") == Fault("kill", step=Span(50, None))


def test_a_variable_holds_several_faults() -> None:
    text = join(["kill@step=3", "", "slow:2@rank=0; nan@step=4"])
    assert [str(fault) for fault in parse_all(text)] == [
        "kill@step=3",
        "slow:2@rank=0",
        "nan@step=4",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kil@step=5", "unknown kind 'kil'; did you mean 'kill'?"),
        ("kill@stp=5", "unknown place 'stp'; did you mean 'step'?"),
        ("kill@step=5,during=reduc", "unknown phase during=reduc; did you mean 'reduce'?"),
        ("kill@rank", "expected NAME=VALUE after @, found 'rank'"),
        ("kill@step=", "expected NAME=VALUE"),
        ("kill@step=1,step=2", "step is given twice"),
        ("kill@step=0", "step must be a whole number from 1, found '0'"),
        ("kill@step=1_0", "step must be a whole number"),
        ("kill@step=9-5", "step=9-5 ends before it begins; write step=5-9"),
        ("kill@rank=-1", "rank must be a whole number from 0, found '-1'"),
        ("kill@step=5,op=3", "step and op exclude each other"),
        ("kill@step=5,during=forming", "during=forming belongs to no step; remove step="),
        ("kill@op=5,during=reduce", "during=reduce is a phase of a step; remove op="),
        ("kill@seconds=nan", "seconds must be a number of seconds from 0, found 'nan'"),
        ("kill:9@step=5", "kill has no value; remove ':9'"),
        ("exit@step=5", "exit needs a value: exit:CODE"),
        ("exit:@step=5", "exit needs a value: exit:CODE"),
        ("exit:256@step=5", "CODE must be a whole number from 0 to 255, found '256'"),
        ("exit:1.5@step=5", "CODE must be a whole number from 0 to 255, found '1.5'"),
        ("stop:0@step=5", "SECONDS must be a number from 0.01 to 86400, found '0'"),
        ("slow:nan@rank=1", "FACTOR must be a number from 1 to 1000, found 'nan'"),
        ("slow:2@during=reduce", "slow has no place during=; possible are rank, step"),
        ("disk-full@step=3", "disk-full has no place step=; possible are rank, commit"),
        ("corrupt@rank=1", "corrupt needs the number of a record: corrupt@sample=N"),
        ("random:kill", "random needs the seconds between two faults"),
        ("random@every=3", "random needs kinds to choose from"),
        ("random:slow@every=3", "random cannot choose 'slow'"),
        ("random:kill@every=3,step=5", "random has no place step="),
        ("random:kill@every=0", "every must be a number of seconds from 0.1, found '0'"),
    ],
)
def test_a_wrong_fault_is_one_line(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text)
    line = str(raised.value)
    assert line.startswith(f"fault {text!r}: ") and complaint in line
    assert "\n" not in line


def test_a_rank_that_does_not_exist_is_refused() -> None:
    check("kill@rank=1;random:kill@every=3,rank=1", 2)
    with pytest.raises(ConfigError, match="no rank 2 among 2 workers; did you mean rank=1"):
        check("kill@rank=2,step=1", 2)
    with pytest.raises(ConfigError, match="no rank 5 among 1 worker; did you mean rank=0"):
        check("random:kill@every=3,rank=5", 1)
