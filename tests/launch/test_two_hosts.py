"""Runs over two real hosts: network namespaces with a real sshd in each."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.allstep_command import processes_with, run, start
from support.hosts import Hosts
from support.ranks import wait_until

HELLO = """
import json, os, sys, allstep, torch, torch.distributed as dist
world = allstep.init()
total = torch.tensor([float(world.rank)])
dist.all_reduce(total)
place = [world.rank, world.size, world.local_rank, world.local_size, world.cross_rank]
here = [os.getcwd(), sys.executable, os.environ["GLOO_SOCKET_IFNAME"], os.environ.get("SECRET")]
print(json.dumps([*place, world.cross_size, world.host, total.item(), *here]))
"""
PLAIN_TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("total", total.item())
dist.destroy_process_group()
"""
FOREVER = """
import time, allstep, torch, torch.distributed as dist
world = allstep.init()
while True:
    dist.all_reduce(torch.ones(1000))
    print("step", flush=True)
    time.sleep(0.1)
"""
SOAK = bool(os.environ.get("ALLSTEP_SOAK"))
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("launched_from", ["outside", "h1"])
def test_four_ranks_on_two_hosts(
    two_hosts: Hosts, script, launched_from: str, tmp_path: Path
) -> None:
    prefix = two_hosts.prefix(0) if launched_from == "h1" else []
    done = run(
        "run",
        "-np",
        "4",
        "-H",
        "h1:2,h2:2",
        "--ssh",
        two_hosts.ssh,
        "python",
        script(HELLO),
        prefix=prefix,
        cwd=tmp_path,
        env={"SECRET": "a b'c"},
    )
    assert done.code == 0, done.err
    worlds = sorted(json.loads(line.partition("] ")[2]) for line in done.out.splitlines())
    assert [world[:7] for world in worlds] == [
        [0, 4, 0, 2, 0, 2, "h1"],
        [1, 4, 1, 2, 0, 2, "h1"],
        [2, 4, 0, 2, 1, 2, "h2"],
        [3, 4, 1, 2, 1, 2, "h2"],
    ]
    for world in worlds:
        assert world[7:] == [6.0, str(tmp_path), sys.executable, "eth0", "a b'c"]
    assert "4 workers on 2 hosts: h1 has ranks 0-1, h2 has ranks 2-3" in done.err


@pytest.mark.parametrize("launched_from", ["outside", "h1"])
def test_a_wrapper_in_place_of_ssh(
    two_hosts: Hosts, script, launched_from: str, tmp_path: Path
) -> None:
    """`--ssh "kubectl exec"` and the like give an agent no address of its host, and may print a lot
    first."""
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(
        "#!/bin/bash\n"
        "yes warning | head -c 1000000 >&2; printf 'Welcome'\n"
        f'exec {two_hosts.ssh} "${{@:1:$#-1}}" "unset SSH_CONNECTION SSH_CLIENT; ${{@: -1}}"\n'
    )
    wrapper.chmod(0o755)
    prefix = two_hosts.prefix(0) if launched_from == "h1" else []
    done = run(
        "run",
        "-H",
        "h1:1,h2:1",
        "--ssh",
        wrapper,
        "python",
        script(HELLO),
        prefix=prefix,
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    worlds = sorted(json.loads(line.partition("] ")[2]) for line in done.out.splitlines())
    assert [(world[0], world[6], world[7], world[10]) for world in worlds] == [
        (0, "h1", 1.0, "eth0"),
        (1, "h2", 1.0, "eth0"),
    ]


SHOW_ENVIRONMENT = """
import json, os
names = ("API_KEY", "WANTED", "ALLSTEP_LOST_SECONDS", "HOME", "RANK")
print(json.dumps({name: os.environ.get(name) for name in names}))
"""


def test_only_named_variables_reach_other_hosts(two_hosts: Hosts, script, tmp_path: Path) -> None:
    """Rank 0, on the launcher's host, gets all; rank 1 gets what was named and what it needs."""
    where = ["run", "-H", "h1:1,h2:1", "--ssh", two_hosts.ssh]
    env = {"API_KEY": "secret", "WANTED": "w", "ALLSTEP_LOST_SECONDS": "77"}
    for option, of_rank_1 in (
        ([], ["secret", "w"]),
        (["--env-only", "WANTED"], [None, "w"]),
        (["--env-only", ""], [None, None]),
    ):
        done = run(
            *where,
            *option,
            "python",
            script(SHOW_ENVIRONMENT),
            prefix=two_hosts.prefix(0),
            cwd=tmp_path,
            env=env,
        )
        assert done.code == 0, done.err
        found = {
            each["RANK"]: each
            for line in done.out.splitlines()
            if (each := json.loads(line.partition("] ")[2]))
        }
        assert [found["0"]["API_KEY"], found["0"]["WANTED"]] == ["secret", "w"]
        assert [found["1"]["API_KEY"], found["1"]["WANTED"]] == of_rank_1, option
        assert found["1"]["ALLSTEP_LOST_SECONDS"] == "77"
        assert found["1"]["HOME"]


# float32, which rounds so little that the number of workers does not show; `auto` may be bfloat16.
DIGITS = ["allstep", "train", "digits", "epochs=2", "precision=float32"]


@pytest.mark.soak(1)
def test_training_across_hosts(two_hosts: Hosts, tmp_path: Path) -> None:
    """Workers on two hosts train the model that one worker here trains."""
    size = 4 if SOAK else 2
    where = [
        "run",
        "-np",
        str(size),
        "-H",
        f"h1:{size // 2},h2:{size // 2}",
        "--ssh",
        two_hosts.ssh,
    ]
    done = run(*where, *DIGITS, "--out", tmp_path / "far", prefix=two_hosts.prefix(0))
    assert done.code == 0, done.err
    assert "h1" in done.out
    assert "h2" in done.out
    alone = run(*DIGITS[1:], "--workers", "1", "--out", tmp_path / "near")
    assert alone.code == 0, alone.err
    far, near = (read_log(tmp_path / name / "run.jsonl") for name in ("far", "near"))
    assert far["size"] == size
    assert near["size"] == 1
    assert far["loss"] == pytest.approx(near["loss"], rel=1e-4)


def read_log(path: Path) -> dict:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    start = next(record for record in records if record["kind"] == "start")
    last_step = [record for record in records if record["kind"] == "step"][-1]
    return {"size": start["world"]["size"], "loss": last_step["loss"]}


def test_a_script_that_knows_only_torch(two_hosts: Hosts, script) -> None:
    done = run("run", "-H", "h1:1,h2:1", "--ssh", two_hosts.ssh, "python", script(PLAIN_TORCH))
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [f"[{rank}] total 2.0" for rank in range(2)]


def test_gloo_is_replaced_on_every_host(two_hosts: Hosts, script) -> None:
    shown = script(
        PLAIN_TORCH.replace(
            'print("total"', "print(type(dist.group.WORLD).__name__, dist.get_backend()"
        )
    )
    done = run("run", "-H", "h1:1,h2:1", "--ssh", two_hosts.ssh, "--replace-gloo", "python", shown)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [f"[{rank}] AllstepGroup gloo 2.0" for rank in range(2)]


@contextmanager
def running(
    *arguments: str | Path, prefix: list[str] | None = None, env: dict[str, str] | None = None
) -> Iterator[tuple]:
    """A run that has taken its first step, and a mark by which its processes are found."""
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    process = start("run", *arguments, prefix=prefix or [], env={"RUN_MARK": mark, **(env or {})})
    try:
        wait_until(lambda: "step" in process.stdout.readline(), 90, "a first step")
        yield process, f"RUN_MARK={mark}"
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launched_from", "lost_seconds"), [("outside", 3), ("h1", 10 if SOAK else 3)]
)
def test_a_host_cut_off_is_named_within_15_seconds(
    two_hosts: Hosts, script, launched_from: str, lost_seconds: int
) -> None:
    prefix = two_hosts.prefix(0) if launched_from == "h1" else []
    where = ["-H", "h1:1,h2:2", "--ssh", two_hosts.ssh]
    env = {"ALLSTEP_LOST_SECONDS": str(lost_seconds)}
    with running(*where, "python", script(FOREVER), prefix=prefix, env=env) as (process, mark):
        two_hosts.cut(1)
        began = time.monotonic()
        try:
            _, err = process.communicate(timeout=60)
            assert time.monotonic() - began < lost_seconds + 12  # promised: + 5, if nothing pauses
            assert process.returncode == 1
            last = err.rpartition("allstep run: ")[2]
            assert last.startswith("host h2 is lost: no sign of life for"), err
            # No message can reach h2, so it stops by itself.
            wait_until(
                lambda: not processes_with(mark), lost_seconds + 20, "the end of all workers"
            )
        finally:
            two_hosts.mend(1)


def agents_of(workers: Iterable[int]) -> set[int]:
    """The parents; what an agent itself has in its environment does not show which run it belongs
    to."""
    parents = {
        int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in workers
    }
    return {
        pid
        for pid in parents
        if b"allstep.launch.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def test_a_machine_that_pauses_loses_no_host(two_hosts: Hosts, script) -> None:
    """All processes are stopped for longer than a host may be silent, and some come back before the
    others can send anything."""
    where, env = ["-H", "h1:1,h2:1", "--ssh", two_hosts.ssh], {"ALLSTEP_LOST_SECONDS": "3"}
    with running(*where, "python", script(FOREVER), env=env) as (process, mark):
        marked = {pid for pid in processes_with(mark) if pid != process.pid}
        pids = [
            process.pid,
            *marked,
            *(agents_of(marked)),
        ]  # the launcher is the first to come back
        for number, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 0)):
            for pid in pids:
                os.kill(pid, number)
                time.sleep(0.1)
            time.sleep(seconds)
        for _ in range(40):
            assert "step" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err


@pytest.mark.soak
def test_nothing_survives_a_killed_launcher(two_hosts: Hosts, script) -> None:
    with running("-H", "h1:1,h2:1", "--ssh", two_hosts.ssh, "python", script(FOREVER)) as (
        process,
        mark,
    ):
        assert len(processes_with(mark)) >= 3
        process.kill()
        wait_until(lambda: not processes_with(mark), 40, "the end of all workers")


def test_no_secret_is_on_a_command_line(two_hosts: Hosts, script) -> None:
    where = ["-H", "h1:1,h2:1", "--ssh", two_hosts.ssh]
    with running(
        *where, "python", script(FOREVER), env={"SECRET": "pa55word-in-the-environment"}
    ) as (process, mark):
        commands = [
            path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()
        ]
        assert not any(b"pa55word" in command for command in commands)
        environments = [
            Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in processes_with(mark)
        ]
        tokens = {
            item.partition(b"=")[2]
            for items in environments
            for item in items
            if item.startswith(b"ALLSTEP_TOKEN=")
        }
        assert len(tokens) == 1
        assert len(token := tokens.pop()) == 32
        assert not any(token in command for command in commands)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130


def test_hosts_that_cannot_be_reached(two_hosts: Hosts, script) -> None:
    done = run("run", "-H", "h1:1,nosuchhost:1", "--ssh", two_hosts.ssh, "python", script(HELLO))
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "nosuchhost" in done.err
    refused = run(
        "run",
        "-H",
        "h1:1,h2:1",
        "--ssh",
        f"{two_hosts.ssh} -o IdentityFile=/dev/null -o IdentitiesOnly=yes -l nobody",
        "python",
        script(HELLO),
    )
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert "Permission denied" in refused.err
    no_ssh = run("run", "-H", "h1:1", "--ssh", "no-such-ssh", "python", script(HELLO))
    assert no_ssh.code == 2
    assert "no-such-ssh" in no_ssh.err


def test_a_command_that_is_missing_there(two_hosts: Hosts) -> None:
    done = run("run", "-H", "h1:1,h2:1", "--ssh", two_hosts.ssh, "no-such-command")
    assert done.code == 2
    assert "command not found: no-such-command (on h" in done.err


def test_an_interface_that_is_missing_there(two_hosts: Hosts, script) -> None:
    done = run(
        "run", "-H", "h1:1,h2:1", "--iface", "eth7", "--ssh", two_hosts.ssh, "python", script(HELLO)
    )
    assert done.code == 2
    assert "--iface eth7: h1 has no such interface" in done.err
