"""`ALLSTEP_SYNC=async allstep run`: the launcher continues without a killed worker."""

import re
import sys
from pathlib import Path

import pytest

from allstep.cli.elastic_options import ElasticOptions
from allstep.cli.horovod.elastic_flags import policy_of
from allstep.errors import ConfigError
from allstep.launch import Policy
from support.allstep_command import run

SCRIPT = """
import os, signal, sys, time
import allstep
import torch
import torch.distributed as dist
from allstep import comm
from allstep.comm.group.init import must_leave, report_updates

how, victim = sys.argv[1], int(sys.argv[2])
world, step = allstep.init(), 0
while step < 400:
    step += 1
    report_updates(step)
    if step == 4 and world.size == 3 and world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
    if how == "leaves" and must_leave():
        world = comm.rejoin(step)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        break
    if how == "stays" and os.path.exists(sys.argv[3]):
        break
    if how == "stays" and must_leave():
        # The launcher has noticed the loss, and stops no worker.
        time.sleep(0.2)
        open(sys.argv[3], "w").close()
print("end", world.rank, world.size, int(ones) if how == "leaves" else step, flush=True)
"""


def test_the_mode_decides_unless_there_is_a_minimum() -> None:
    continuing = Policy.continuing(3)
    for mode in ("async", "stale:2", "clock:4", "lazy:4", "elastic:8"):
        assert policy_of({}, 3, 30.0, mode, as_horovodrun=False) == continuing
    # A script that averages weights waits for all ranks: it could not continue.
    for mode in ("", "allreduce", "server", "local:8", "diloco:32"):
        assert policy_of({}, 3, 30.0, mode, as_horovodrun=False) is None
    assert policy_of({}, 1, 30.0, "async", as_horovodrun=False) is None
    with_minimum = policy_of({"min_np": 2}, 3, 30.0, "async", as_horovodrun=False)
    assert with_minimum is not None and with_minimum.replaces


def test_the_mode_of_a_training_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    from allstep.train.config import sync_config
    from allstep.train.config.run_config import RunConfig

    monkeypatch.setattr(sync_config, "AVAILABLE", ("async",))
    config = RunConfig(sync=sync_config.SyncConfig(name="async"))
    none = ElasticOptions(None, None, None, None)
    assert none.policy(3, config) == Policy.continuing(3)
    assert none.policy(1, config) is None
    assert none.policy(3, RunConfig()) is None


def test_a_wrong_mode_is_named_with_its_variable() -> None:
    with pytest.raises(ConfigError, match="ALLSTEP_SYNC=asinc: unknown mode; did you mean 'async'"):
        policy_of({}, 2, 30.0, "asinc", as_horovodrun=False)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("how", "victim"), [("leaves", 2), ("stays", 0)])
def test_the_others_continue_without_a_killed_worker(how: str, victim: int, tmp_path: Path) -> None:
    """They form a world of two, or work on in the old one, as scripts that know nothing of it."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    mark = tmp_path / "seen"
    command = [sys.executable, str(script), how, str(victim), str(mark)]
    done = run("run", "-np", "3", *command, env={"ALLSTEP_SYNC": "async"})
    assert done.code == 0, done.err
    (line, *more) = done.err.splitlines()
    assert re.fullmatch(
        rf"allstep run: lost rank {victim} on localhost: killed by signal 9 \(SIGKILL\); [\d.]+ s"
        r" after the start; 2 workers continue without it",
        line,
    )
    ends = sorted(found for found in re.findall(r"end (\d) (\d) (\d+)", done.out))
    if how == "leaves":
        assert ends == [("0", "2", "2"), ("1", "2", "2")]
        assert len(more) == 1 and "generation 1 has 2 workers, 0 of them new" in more[0]
    else:
        assert [each[:2] for each in ends] == [("1", "3"), ("2", "3")]
        assert more == [] and mark.exists()
