"""--max-failures of `allstep train` and `allstep run`: its effect and its wrong values."""

import sys

import pytest

from allstep.cli.elastic_options import ElasticOptions
from allstep.cli.horovod.elastic_flags import idle_options, policy_of, with_max_failures
from allstep.cli.numbers import MOST
from allstep.errors import ConfigError
from support.allstep_command import run


def test_the_policy_of_a_run_has_it() -> None:
    flags = with_max_failures({"min_np": 1}, 7)
    assert policy_of(flags, 2, 30.0, as_horovodrun=False).max_failures == 7
    without = with_max_failures({"min_np": 1}, None)
    assert policy_of(without, 2, 30.0, as_horovodrun=False).max_failures == 3


def test_the_policy_of_a_training_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from allstep.train.config import check_config
    from allstep.train.config.run_config import RunConfig

    monkeypatch.setattr(check_config, "check_elastic", lambda *_: None)
    for given, expected in ((5, 5), (None, 3)):
        policy = ElasticOptions(1, None, None, None, given).policy(2, RunConfig())
        assert policy is not None and policy.max_failures == expected


def test_it_needs_an_elastic_run() -> None:
    with pytest.raises(ConfigError, match="--max-failures 4 needs an elastic run; add --min-work"):
        ElasticOptions(None, None, None, None, 4).check()
    with pytest.raises(ConfigError, match="--max-failures 4 needs an elastic run; add --min-np N"):
        with_max_failures({}, 4)


def test_horovods_rule_takes_precedence() -> None:
    flags = with_max_failures({"min_np": 1}, 4)
    assert "--max-failures (horovodrun blacklists" in idle_options(flags, as_horovodrun=True)
    assert idle_options(flags, as_horovodrun=False) == ""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "command",
    [
        ["train", "digits", "--workers", "2", "--min-workers", "1"],
        ["run", "-np", "2", "--min-np", "1"],
    ],
    ids=["train", "run"],
)
def test_less_than_one_is_one_line(command: list[str]) -> None:
    more = [sys.executable, "-c", ""] if command[0] == "run" else []
    done = run(*command, "--max-failures", "0", *more)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert f"--max-failures: expected a number from 1 to {MOST}, found 0" in line
