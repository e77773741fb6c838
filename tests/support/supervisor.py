"""Keeps the namespaces and daemons of a test run, and removes every trace of them when the run
ends, however it ends.

A `Supervisor` is a child process of the test run. It starts what it is told (one JSON line per process
on its standard input, one line back) and waits. End of file on that pipe, or another parent, means
that the run is over, even if it was killed with -9: the supervisor then kills every process that lives
in one of its network namespaces and removes its folder. Namespaces have no names: the kernel drops
them, and the links in them, with their last process. So nothing has to be found again by a later
run but the folder of a supervisor that was itself killed; folders are locked while their supervisor lives,
and the next supervisor removes those that are not.
"""

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PREFIX = "allstep-test-"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """The test run's end of the pipe. `folder` is short enough for the paths of Unix sockets."""

    def __init__(self) -> None:
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests; the supervisor goes after them
        )
        self._answer()

    def host(self, script: str) -> int:
        """Makes new model, uts and mount namespaces, runs the shell `script` in them, and returns the
        pid that holds them open."""
        return self._ask(host=script)

    def start(self, argv: list[str], log: str, env: dict[str, str] | None = None) -> int:
        """Starts a daemon (in the foreground, inside one of the hosts) and returns its pid."""
        return self._ask(argv=argv, log=log, env=env)

    def log(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _ask(self, **what: object) -> int:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self._process.stdout
        answer = json.loads(
            self._process.stdout.readline() or '{"error": "the supervisor is gone"}'
        )
        if "error" in answer:
            raise OSError(answer["error"])
        return int(answer["pid"])


def _sweep() -> None:
    """Removes the folders of supervisors that were killed."""
    for lock in Path("/tmp").glob(f"{PREFIX}*/lock"):
        try:
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # its supervisor lives


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _start_host(script: str) -> tuple[int, int]:
    """The holder's pid, and an open descriptor of its network namespace (so that its number is not
    used again)."""
    holder = subprocess.Popen(
        [
            "unshare",
            "--net",
            "--uts",
            "--mount",
            "sh",
            "-ec",
            script + "\necho ready; exec sleep infinity >&-",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_die_with_parent,
        text=True,
    )
    assert holder.stdout
    assert holder.stderr
    if holder.stdout.readline() != "ready\n":
        raise OSError(f"no host: {holder.stderr.read().strip()}")
    return holder.pid, os.open(f"/proc/{holder.pid}/ns/net", os.O_RDONLY)


def _start_daemon(folder: Path, argv: list[str], log: str, env: dict[str, str] | None) -> int:
    with (folder / log).open("ab") as file:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=env,
            preexec_fn=_die_with_parent,
        ).pid


def _living_in(namespaces: set[int]) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "ns/net").stat().st_ino in namespaces:
                found.append(int(entry.name))
        except OSError:
            continue  # gone meanwhile
    return found


def _kill_all(descriptors: list[int]) -> None:
    namespaces = {os.fstat(descriptor).st_ino for descriptor in descriptors}
    end = time.monotonic() + 10
    while (pids := _living_in(namespaces)) and time.monotonic() < end:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
        _reap()


def _reap() -> None:
    """Collects the dead: our children, and their orphans, which come to us."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _wait_for_line(parent: int) -> str:
    while not select.select([sys.stdin], [], [], 0.5)[0]:
        _reap()
        if os.getppid() != parent:
            return ""
    return sys.stdin.readline()


def main(folder: Path) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    descriptors: list[int] = []
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(json.dumps({"pid": os.getpid()}), flush=True)
        while line := _wait_for_line(parent):
            request = json.loads(line)
            try:
                if "host" in request:
                    pid, descriptor = _start_host(request["host"])
                    descriptors.append(descriptor)
                else:
                    pid = _start_daemon(folder, **request)
                print(json.dumps({"pid": pid}), flush=True)
            except OSError as error:
                print(json.dumps({"error": str(error)}), flush=True)
        _kill_all(descriptors)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
