"""Horovod's elastic scenarios through the real `horovodrun`, on one machine.

`localhost`, `127.0.0.1` and `127.0.0.2` are three hosts: names count as they are listed.
"""

import os
import sys
from pathlib import Path

import pytest

from allstep.launch.horovod import FOLDER
from support.allstep_command import Done, processes_with, run
from support.elastic_script import ElasticScript

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.timeout(240)]
STATUS = "one or more processes exited with non-zero status"


def horovodrun(*arguments: str, script: ElasticScript) -> Done:
    """Run bin/horovodrun as found on the PATH, with a script that is polled five times a second."""
    folders = [str(FOLDER / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {"PATH": os.pathsep.join(folders), "ALLSTEP_DISCOVERY_SECONDS": "0.2"}
    shell = ["sh", "-c", 'exec horovodrun "$@"', "horovodrun"]
    found = ("--host-discovery-script", script.discovery)
    return run(*found, *arguments, command=shell, env=env, limit=220)


def test_hosts_are_added_removed_and_returned(tmp_path: Path) -> None:
    """The script alone makes the job elastic. A bad list leaves the last good one in place."""
    script = ElasticScript(tmp_path, ["localhost:1"])
    both = ["127.0.0.1", "localhost:1"]
    hosts = {"0": [both], "1": [["127.0.0.1:1"]], "2": [["a host: 1"], both]}
    done = horovodrun("-np", "1", *script.command(epochs=4, hosts=hosts), script=script)
    assert done.code == 0, done.err
    assert script.log == [
        (0, "localhost", 0, 1, 1),
        (1, "localhost", 0, 2, 2),
        (2, "127.0.0.1", 1, 1, 3),
        (3, "127.0.0.1", 1, 2, 4),
    ]
    lines = [line for line in done.err.splitlines() if not line.startswith("allstep run: hosts")]
    generations = [line for line in lines if "; generation " in line]
    assert [line.partition("; generation ")[2][:18] for line in generations] == [
        "1 has 2 workers, 1",
        "2 has 1 workers, 0",
        "3 has 2 workers, 1",
    ]
    (warning,) = set(lines) - set(generations)
    assert "'a host: 1' is not HOST or HOST:NUMBER" in warning
    assert warning.endswith("; the last list of hosts counts")
    assert "finished 0 of 2 on 127.0.0.1" in done.out
    assert processes_with(str(tmp_path)) == []


def test_a_failing_worker_blacklists_its_host_until_it_has_cooled_down(tmp_path: Path) -> None:
    """Rank 0 fails by an exception; later a worker of the host that has returned is killed."""
    script = ElasticScript(tmp_path, ["localhost:2", "127.0.0.1:1"])
    options = ["-np", "3", "--min-np", "1", "--blacklist-cooldown-range", "1", "5"]
    plan = {"fail": {"1": [[0], "raise"], "3": [[1], "kill"]}, "size": {"2": 3}}
    done = horovodrun(*options, *script.command(epochs=4, **plan), script=script)
    assert done.code == 0, done.err
    assert script.log[:2] == [(0, "localhost", 0, 3, 1), (1, "127.0.0.1", 2, 1, 2)]
    # The two workers of the host that has returned join together, or one after the other.
    assert script.log[2] in [(2, "127.0.0.1", 2, 3, 3), (2, "127.0.0.1", 2, 3, 4)]
    assert script.log[3][:3] == (3, "127.0.0.1", 2), "whose state is as old as the run"
    generations = [line for line in done.err.splitlines() if "; generation " in line]
    # On a busy machine its exit may take longer than the grace time: then it is killed.
    assert generations[0].startswith("allstep run: lost rank 0 on localhost: ")
    assert "RuntimeError: start rank 0 fails in epoch 1" in done.err
    number = script.log[2][4]
    killed = f": killed by signal 9 (SIGKILL); generation {number} has 1 workers"
    assert killed in generations[number - 1]


def test_all_workers_fail_and_all_hosts_are_blacklisted(tmp_path: Path) -> None:
    script = ElasticScript(tmp_path, ["localhost:1", "127.0.0.1:1"])
    command = script.command(epochs=1, fail={"0": [[0, 1], "raise"]})
    done = horovodrun("-np", "2", "--min-np", "1", *command, script=script)
    assert done.code == 1
    assert "RuntimeError: start rank 0 fails in epoch 0" in done.err
    assert done.err.splitlines()[-1] == f"allstep run: {STATUS}"


def test_too_few_workers_for_too_long(tmp_path: Path) -> None:
    script = ElasticScript(tmp_path, ["localhost:1", "127.0.0.1:1"])
    command = script.command(epochs=2, fail={"1": [[1], "kill"]})
    done = horovodrun("-np", "2", "--elastic-timeout", "1", *command, script=script)
    assert done.code == 75, done.err
    assert "1 workers can continue, the minimum is 2" in done.err
    assert done.err.splitlines()[-1] == f"allstep run: {STATUS}"


def test_a_removal_below_the_minimum_waits_for_another_host(tmp_path: Path) -> None:
    """Horovod deadlocks there. A second reset is one too many: the run ends at once."""
    script = ElasticScript(tmp_path, ["localhost:1", "127.0.0.1:1"])
    hosts = {"0": [["localhost:1"], ["localhost:1", "127.0.0.2:1"]]}
    command = script.command(epochs=3, hosts=hosts, fail={"2": [[1], "kill"]})
    done = horovodrun("-np", "2", "--reset-limit", "1", *command, script=script)
    assert script.log == [(0, "localhost", 0, 2, 1), (1, "localhost", 0, 2, 2)]
    assert done.code == 1
    assert "number of resets during elastic job exceeded limit (1)" in done.err
