"""`allstep.run`, which is `horovod.run`: a function on many workers."""

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import allstep
from allstep.errors import ConfigError
from allstep.launch.horovod import FOLDER
from allstep.launch.large_values import chunks, collect
from support.allstep_command import processes_with
from support.hosts import Hosts
from support.ranks import clean_environment, wait_until

# The contract, section 5.3.
SIGNATURE = """(func, args=(), kwargs=None, num_proc=1, min_num_proc=None, max_num_proc=None,
slots=None, reset_limit=None, cooldown_range=None, hosts=None, hostfile=None,
host_discovery_script=None, start_timeout=None, ssh_port=None, ssh_identity_file=None,
disable_cache=None, output_filename=None, verbose=None, use_gloo=None, use_mpi=None, mpi_args=None,
network_interface=None, network_interfaces=None, executable=None, np=None, min_np=None,
max_np=None)"""


@pytest.fixture(autouse=True)
def without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)


def test_the_signature_is_horovods() -> None:
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(allstep.run).parameters.values()
    ]
    assert str(inspect.Signature(plain)) == SIGNATURE.replace("\n", " ")


@pytest.mark.usefixtures("processes")
def test_results_come_by_rank_and_lines_are_shown(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    offset = 100  # a closure

    def add(number: int, *, factor: int) -> tuple[int, int, int]:
        world = allstep.World.detect()
        print("I am", world.rank)
        return world.rank, world.size, offset + number * factor

    found = allstep.run(add, args=(7,), kwargs={"factor": 3}, num_proc=3, output_filename=tmp_path)
    assert found == [(rank, 3, 121) for rank in range(3)]
    assert sorted(capfd.readouterr().out.splitlines()) == [
        f"[{rank}] I am {rank}" for rank in range(3)
    ]
    assert (tmp_path / "rank.2" / "stdout").read_text() == "I am 2\n"


@pytest.mark.usefixtures("processes")
def test_large_arguments_and_results_pass() -> None:
    data = os.urandom(1 << 20) * 70  # above the largest value of a store
    assert allstep.run(lambda text: text[::-1], (data,)) == [data[::-1]]


def test_chunks() -> None:
    for data in (b"", b"a", os.urandom(1 << 20) * 33):
        store = dict(chunks("key", data))
        assert max(map(len, store.values())) <= 1 << 20
        assert collect("key", store.get) == data
    assert collect("other", store.get) is None


@pytest.mark.usefixtures("processes")
def test_a_failing_worker_is_an_error_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        if allstep.World.detect().rank == 1:
            raise KeyError("the reason")
        time.sleep(100)

    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"non-zero status \(1\)") as caught:
        allstep.run(fail, num_proc=2)
    assert time.monotonic() - began < 50
    assert "rank 1 on localhost failed first of 2" in str(caught.value)
    assert "KeyError: 'the reason'" in str(caught.value)
    with pytest.raises(RuntimeError, match=r"killed by signal 9 \(SIGKILL\)"):
        allstep.run(os.kill, (0, signal.SIGKILL))
    with pytest.raises(RuntimeError, match="rank 0 exited with code 0 but returned no result"):
        allstep.run(sys.exit)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"hosts": "a:1", "hostfile": "f"}, ValueError, "hosts and hostfile"),
        ({"use_gloo": True, "use_mpi": True}, ValueError, "use_gloo and use_mpi"),
        ({"num_proc": True}, ValueError, "num_proc: expected a whole number, found True"),
        ({"num_proc": 1.5}, ValueError, "num_proc: expected a whole number, found 1.5"),
        (
            {"num_proc": 3, "hosts": "localhost:2"},
            ConfigError,
            "-np 3 asks for more workers than the 2 slots",
        ),
        ({"start_timeout": -1}, ConfigError, "--start-timeout -1"),
        ({"executable": "no-such-python"}, ConfigError, "command not found: no-such-python"),
    ],
)
def test_wrong_use(options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        allstep.run(print, **options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("processes")
def test_old_names_warn_and_work(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(
        DeprecationWarning, match="np is deprecated: the argument is called num_proc"
    ):
        assert allstep.run(lambda: 5, np=2) == [5, 5]
    with pytest.warns(DeprecationWarning, match="min_np is deprecated"):
        assert allstep.run(lambda: 5, num_proc=2, min_np=1, cooldown_range=(1, 2)) == [5]
    notice = "--blacklist-cooldown-range (only horovodrun blacklists hosts)"
    assert f"without effect here: {notice}" in capfd.readouterr().err


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(200)
def test_an_elastic_call_continues_when_rank_0_is_killed(tmp_path: Path) -> None:
    """The script alone makes it elastic; it lists another host after the kill."""
    killed = tmp_path / "killed"

    def train() -> tuple[int, int, list[int]]:
        import os
        import signal
        import time

        import allstep.torch as hvd

        hvd.init()

        @hvd.elastic.run
        def run(state):
            while state.step < 5:
                if state.step == 2 and hvd.rank() == 0 and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if state.step < 4 or hvd.size() == 3:
                    state.step += 1
                    state.sizes = [*state.sizes, hvd.size()]
                else:
                    time.sleep(0.05)
                state.commit()

        state = hvd.elastic.TorchState(step=0, sizes=[])
        run(state)
        return hvd.rank(), int(os.environ["HOROVOD_RANK"]), state.sizes

    script = f"echo localhost:2; test ! -e {killed} || echo 127.0.0.1"
    results = allstep.run(train, num_proc=2, host_discovery_script=script)
    assert [each[:2] for each in results] == [(0, 0), (1, 1)]
    (sizes, others) = (each[2] for each in results)
    assert sizes == others and sizes[:2] == [2, 2] and sizes[-1] == 3 and len(sizes) == 5


@pytest.mark.usefixtures("processes")
def test_from_a_thread_and_from_within_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in allstep.World.alone().to_env().items():
        monkeypatch.setenv(name, value)
    found: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: found.append(allstep.run(lambda: allstep.World.detect().size, num_proc=2))
    )
    thread.start()
    thread.join()
    assert found == [[2, 2]]


def test_on_two_hosts(two_hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_SSH", two_hosts.ssh)
    found = allstep.run(lambda: allstep.World.detect().host, num_proc=3, hosts="h1:1,h2:2")
    assert found == ["h1", "h2", "h2"]


@pytest.mark.usefixtures("processes")
def test_from_a_script_with_a_module_next_to_it(tmp_path: Path) -> None:
    """Functions of `__main__` and of a module that only the script's folder has; Horovod's name as
    the script imports it."""
    (tmp_path / "neighbor.py").write_text("def twice(x):\n    return 2 * x\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(FOLDER)!r})
        import horovod, neighbor
        def named():
            import horovod
            return horovod.__file__
        if __name__ == "__main__":
            assert horovod.run is horovod.runner.run
            print(horovod.run(neighbor.twice, (4,), num_proc=2))
            print(horovod.run(named) == [horovod.__file__])
        """)
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=100, cwd="/"
    )
    assert done.stdout == "[8, 8]\nTrue\n", done.stderr


CALLER = """
import allstep, sys, time
def wait():
    print("up", flush=True)
    time.sleep(1000)
try:
    allstep.run(wait, num_proc=2)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_caller(number: signal.Signals) -> None:
    value = f"{os.getpid()}.{time.monotonic_ns()}"
    process = subprocess.Popen(
        [sys.executable, "-c", CALLER],
        env={**clean_environment(), "RUN_MARK": value},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(2):
        assert "up" in process.stdout.readline()
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert ("interrupted" in rest) == (number == signal.SIGINT)
    wait_until(lambda: not processes_with(f"RUN_MARK={value}"), 40, "the end of the workers")
