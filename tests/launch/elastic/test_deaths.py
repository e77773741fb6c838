"""Workers that stop or die, two at once and while the next world forms; and the launcher."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.allstep_command import Done, processes_with, run, start
from support.hosts import Hosts
from support.ranks import wait_until

STEPS = Path(__file__).parents[2] / "support" / "elastic_steps.py"


def command(folder: Path, num_steps: int, plan: dict[str, dict[str, str]]) -> list[str]:
    return [sys.executable, str(STEPS), str(folder), str(num_steps), json.dumps(plan)]


def results(done: Done) -> list[list[Any]]:
    lines = [line.partition("result ")[2] for line in done.out.splitlines() if "result " in line]
    return sorted(json.loads(line) for line in lines)


@pytest.mark.usefixtures("processes")
def test_a_stopped_worker_is_killed_only_when_a_new_world_must_form(tmp_path: Path) -> None:
    """Worker 1 stops for longer than a host may be silent: the others wait for it.

    It stops again, for good, while worker 2 is killed: it does not leave the old world within 2 s
    and the time of its last step, so the launcher kills it, and worker 0 continues.
    """
    plan = {"1": {"3": "stop:3", "8": "stop"}, "2": {"8": "kill"}}
    done = run(
        *("run", "-np", "3", "--min-np", "1", *command(tmp_path, 12, plan)),
        env={"ALLSTEP_LOST_SECONDS": "1"},
    )
    assert done.code == 0, done.err
    ((number, sizes, generations, (gap,)),) = results(done)
    assert (number, generations) == (0, [0, 1])
    # On a slow machine, the successor of worker 2 joins within the grace time.
    assert sizes[:8] == [3] * 8 and set(sizes[8:]) <= {1, 2} and len(sizes) == 12
    assert gap > 1.9, "the grace time of the stopped worker"
    lines = [line for line in done.err.splitlines() if line.startswith("allstep run: ")]
    assert lines[0].startswith(
        "allstep run: lost rank 2 on localhost: killed by signal 9 (SIGKILL); generation 1 has "
    ), done.err
    assert "is worker 0 on localhost" in lines[0] and "is worker 1 on" not in lines[0]
    assert not processes_with(str(tmp_path))


@pytest.mark.usefixtures("processes")
def test_two_victims_at_once_and_one_while_the_next_world_forms(tmp_path: Path) -> None:
    plan = {"1": {"4": "kill"}, "2": {"4": "kill"}, "3": {"3": "die forming"}}
    done = run("run", "-np", "4", "--min-np", "1", *command(tmp_path, 8, plan))
    assert done.code == 0, done.err
    ((number, sizes, generations, _),) = results(done)
    assert number == 0
    assert sizes[:4] == [4] * 4 and set(sizes[4:]) <= {1, 2, 3} and len(sizes) == 8
    # The world of workers 0 and 3 ended while it was formed; `rejoin` returns the one after it.
    assert generations[0] == 0 and generations[-1] >= 2, done.err
    assert "fault kill@during=forming: rank 3 kills itself" in done.err
    assert not processes_with(str(tmp_path))


@pytest.mark.usefixtures("processes")
def test_the_end_of_the_launcher_ends_all_processes(tmp_path: Path) -> None:
    """Also a worker that is stopped."""
    plan = {"0": {"3": "sleep"}, "1": {"3": "stop"}}
    launcher = start("run", "-np", "2", "--min-np", "1", *command(tmp_path, 5, plan))
    try:
        wait_until((tmp_path / "reached").exists, 100, "the third step")
        os.kill(launcher.pid, signal.SIGKILL)
        wait_until(lambda: not processes_with(str(tmp_path)), 60, "the end of all processes")
    finally:
        launcher.kill()
        launcher.communicate()


@pytest.mark.timeout(240)
def test_a_host_that_is_cut_off_is_left_out_after_its_workers_were_killed(
    two_hosts: Hosts, tmp_path: Path
) -> None:
    """The agent kills them before the launcher forms a world without them (D14)."""
    lost = 6.0
    plan = {"1": {"3": "announce"}}
    hosts = ["-np", "2", "--min-np", "1", "-H", "h1:1,h2:1", "--ssh", two_hosts.ssh]
    launcher = start(
        *("run", *hosts, *command(tmp_path, 10**6, plan)),
        env={"ALLSTEP_LOST_SECONDS": str(lost)},
    )
    try:
        wait_until((tmp_path / "reached").exists, 100, "the third step")
        two_hosts.cut(1)
        cut_at = time.monotonic()
        wait_until((tmp_path / "joined 1").exists, 60, "the next world")
        joined_at = float((tmp_path / "joined 1").read_text())
        assert joined_at - cut_at > 0.9 * lost - 1.0
        assert processes_with("ALLSTEP_HOST=h2") == [], "killed while the link is cut"
        assert float((tmp_path / "alive 1").read_text()) < joined_at
        two_hosts.mend(1)
        step = (tmp_path / "alive 0").read_text()
        wait_until(lambda: (tmp_path / "alive 0").read_text() not in ("", step), 60, "a step")
    finally:
        two_hosts.mend(1)
        launcher.kill()
        _, err = launcher.communicate()
    assert "lost host h2: no sign of life for " in err
    assert "generation 1 has 1 workers, 0 of them new: rank 0 is worker 0 on h1" in err
    wait_until(lambda: not processes_with(str(tmp_path)), 60, "the end of all processes")
