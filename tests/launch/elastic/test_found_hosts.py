"""Hosts of a discovery script that are too few or cannot be used, and wrong use; without torch.

A command that joins no world ends the run by its exit code.
"""

import os
import sys
from pathlib import Path

import pytest

from allstep import cli
from support.allstep_command import processes_with, run
from support.ranks import clean_environment


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Call `allstep run` in this process; return the one line that it prints."""

    def call(*arguments: str) -> str:
        for name in set(os.environ) - set(clean_environment()):
            monkeypatch.delenv(name)
        monkeypatch.setattr(sys, "argv", ["allstep", "run", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1), err
        return err

    return call


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("/no/such/script", "exit code 127, standard error"),
        ("echo why >&2; exit 3", "failed: exit code 3, standard error 'why'"),
        ("echo localhost:1; echo localhost:2", "printed localhost with 1 and with 2 slots"),
        ("echo localhost; echo one two", "'one two' is not HOST or HOST:NUMBER"),
    ],
)
def test_the_first_poll_must_succeed(refused, script: str, expected: str) -> None:
    for options in (["--as-horovodrun", "-np", "1"], ["-np", "1", "--min-np", "1"]):
        line = refused(*options, "--host-discovery-script", script, "true")
        assert line.startswith(f"allstep: --host-discovery-script {script}")
        assert expected in line


@pytest.mark.usefixtures("processes")
def test_wrong_use(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ["--host-discovery-script", "echo localhost"]
    line = refused("--as-horovodrun", *script, "true")
    assert "the number of workers is missing: give -np N" in line
    assert "--hostfile and --host-discovery-script both" in refused(
        "--min-np", "1", "--hostfile", "f", *script, "true"
    )
    line = refused("-np", "1", "--min-np", "2", *script, "true")
    assert "a minimum of 2 workers is above their number 1" in line
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "soon")
    line = refused("-np", "1", "--min-np", "1", *script, "true")
    assert "HOROVOD_ELASTIC_TIMEOUT='soon' is no timeout" in line


@pytest.mark.usefixtures("processes")
def test_hosts_that_cannot_be_used_do_not_end_the_run(tmp_path: Path) -> None:
    """ssh fails, then hangs. Each reason is printed once, and no process is left."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"""#!/bin/sh
if test -e {tmp_path}/called; then touch {tmp_path}/again; exec sleep 998; fi
touch {tmp_path}/called
echo no route to far >&2
exit 255
""")
    ssh.chmod(0o755)
    script = "echo localhost:1; echo far:2"
    options = ["-np", "1", "--min-np", "1", "--ssh", str(ssh), "--host-discovery-script", script]
    env = {"ALLSTEP_START_TIMEOUT": "1", "ALLSTEP_DISCOVERY_SECONDS": "0.2"}
    command = f"until test -e {tmp_path}/again; do sleep 0.1; done; echo {tmp_path}"
    done = run("run", *options, "sh", "-c", command, env=env)
    assert (done.code, done.out) == (0, f"[0] {tmp_path}\n"), done.err
    first, second = done.err.splitlines()
    assert first.startswith("allstep run: no worker can start on far: ssh to far failed: no route")
    assert second.startswith("allstep run: no worker can start on far: no answer from far within")
    assert processes_with(str(tmp_path)) == []


@pytest.mark.usefixtures("processes")
def test_too_few_hosts_at_the_start() -> None:
    script = ["--host-discovery-script", "echo localhost:1"]
    done = run(
        "run", "--as-horovodrun", "-np", "2", "--elastic-timeout", "1", *script, "sleep", "99"
    )
    assert done.code == 1
    assert "0 of 2 workers are on standby and the hosts have 1 usable slots" in done.last_lines
