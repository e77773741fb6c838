"""`allstep.run(function, num_proc=4)`: calls a function on workers and returns their results.

It has the arguments of `horovod.run`.

    caller (a store with the pickled call)  -->  allstep run  -->  worker: makes the call
           <--------------------- results by rank -------------------/

`allstep run` starts the workers in a process of its own, because a caller may have threads, may be
a notebook, and keeps its signal handlers. The call is pickled by cloudpickle, so functions of a
notebook or of `__main__` work; workers search the caller's import path first. Pickled bytes are cut
into chunks that fit into the store (`large_values`).
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import IO, Any, TextIO

from allstep import wire
from allstep.errors import ConfigError
from allstep.launch.large_values import chunks, collect
from allstep.process.family import keep_exit_codes
from allstep.process.python import run_module

# Starts of the launcher's own lines.
_OWN = ("allstep run: ", "allstep: ")
_KEPT_LINES = 500
# The option of `allstep run` for each argument, in the order of its command line.
_FLAGS = {
    "num_proc": "-np",
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "slots": "--slots-per-host",
    "reset_limit": "--reset-limit",
    "cooldown_range": "--blacklist-cooldown-range",
    "hosts": "-H",
    "hostfile": "--hostfile",
    "host_discovery_script": "--host-discovery-script",
    "start_timeout": "--start-timeout",
    "ssh_port": "-p",
    "ssh_identity_file": "-i",
    "disable_cache": "--disable-cache",
    "output_filename": "--output-filename",
    "verbose": "--verbose",
    "use_gloo": "--gloo",
    "use_mpi": "--mpi",
    "mpi_args": "--mpi-args",
    "network_interfaces": "--network-interfaces",
}
_RENAMED = {
    "np": "num_proc",
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
    "network_interface": "network_interfaces",
}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | os.PathLike[str] | None = None,
    disable_cache: bool | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on `num_proc` workers and return their results by rank.

    The other arguments are options of `horovodrun`, with the same meaning and default (None):

    - `hosts` ("h1:2,h2:4"), `hostfile` and `host_discovery_script` name hosts and their slots
      (default: this host). `slots`: slots of a host for which the script prints no number.
    - `start_timeout`: seconds in which all ranks must join (default: 30). `output_filename`: folder
      for the workers' output. `executable`: Python of the workers (default: this one). `verbose`:
      print the command, the hosts and the environment variables that the options set.
    - `ssh_port`, `ssh_identity_file`: port and private key for ssh to other hosts.
      `network_interfaces`: names of network interfaces, as a list or separated by commas; the first
      one is used for the traffic between hosts.
    - `min_num_proc` or `host_discovery_script` makes the run elastic: it starts with `num_proc`
      workers and continues with at least `min_num_proc` (default: `num_proc`), at most
      `max_num_proc`. The script is polled, so hosts may come and go; `reset_limit` bounds how often
      the world changes. The results are those of the first `min_num_proc` ranks of the last world.
    - Accepted without effect, and a notice states the reason: `cooldown_range` (a failed worker is
      replaced, its host is not blacklisted), `use_gloo`, `use_mpi` and `mpi_args`. `disable_cache`
      has no effect either: no checks of hosts are cached.
    - Deprecated names: `np`, `min_np`, `max_np`, `network_interface`.

    A worker that fails stops the others and raises RuntimeError with its traceback; in an elastic
    run only if the others cannot continue.
    """
    # The first statement, while the arguments are the only local names.
    given = dict(locals())
    options = _options(given)
    command = run_module("allstep", "run", *_arguments(options))
    command += run_module("allstep.launch.function_worker", executable=executable)
    everywhere = bool(hosts or hostfile or host_discovery_script)
    results = _call(command, func, args, kwargs or {}, bind="" if everywhere else "127.0.0.1")
    return results[: options["--min-np"]]


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `allstep run`, by flag, for the arguments of `run`.

    Raises ValueError for arguments that exclude each other; warns of deprecated names.
    """
    for old, new in _RENAMED.items():
        if given[old] is not None:
            # Level 1 is this line, 2 is `run`, 3 is its caller.
            warnings.warn(
                f"{old} is deprecated: the argument is called {new} now",
                DeprecationWarning,
                stacklevel=3,
            )
            given[new] = given[old] or given[new]
    num_proc, interfaces = given["num_proc"], given["network_interfaces"]
    if isinstance(num_proc, bool) or not isinstance(num_proc, Integral):
        raise ValueError(f"num_proc: expected a whole number, found {num_proc!r}")
    if given["hosts"] and given["hostfile"]:
        raise ValueError("hosts and hostfile both name the hosts; give one of them")
    if given["use_gloo"] and given["use_mpi"]:
        raise ValueError("use_gloo and use_mpi exclude each other; give one of them or none")
    if given["host_discovery_script"] and given["min_num_proc"] is None:
        given["min_num_proc"] = num_proc
    given["verbose"] = bool(given["verbose"])
    if interfaces is not None and not isinstance(interfaces, str):
        given["network_interfaces"] = ",".join(interfaces)
    return {flag: given[name] for name, flag in _FLAGS.items()}


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the options that were given as arguments of a command line."""
    found: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, tuple | list) else [value]
        found += [name, *map(str, values)]
    return found


def _call(
    command: list[str], func: Callable[..., Any], args: Any, kwargs: Any, bind: str
) -> list[Any]:
    """Run the launcher's `command` with a store that holds the call; return the results by rank.

    bind: the address on which the store listens.
    """
    # cloudpickle has no type stubs.
    import cloudpickle  # type: ignore[import-untyped]

    token = wire.new_token()
    path = [str(Path(entry).resolve()) for entry in sys.path]
    # The results belong to the caller, so only the memory of this machine limits them.
    with wire.Server(token, bind, max_nbytes=_half_of_memory()) as store:
        call = cloudpickle.dumps((func, tuple(args), dict(kwargs)))
        for key, chunk in chunks("call", cloudpickle.dumps((path, call))):
            store.set(key, chunk)
        env = {**os.environ, "ALLSTEP_CALL_PORT": str(store.port), "ALLSTEP_CALL_TOKEN": token}
        with keep_exit_codes():
            code, notices = _run_launcher(command, env)
        if store.failure:
            raise RuntimeError(f"the store of this call ended by itself: {store.failure}")
        if code == 2 and notices and notices[-1].startswith("allstep: "):
            raise ConfigError(notices[-1].removeprefix("allstep: "))
        if code:
            raise RuntimeError(
                f"a worker exited with non-zero status ({code})\n" + "\n".join(notices)
            )
        return _results(store)


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _run_launcher(command: list[str], env: dict[str, str]) -> tuple[int, list[str]]:
    """Run the launcher and copy its output; return its exit code and its own last lines."""
    notices: deque[str] = deque(maxlen=_KEPT_LINES)
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert process.stdout and process.stderr
    readers = [
        threading.Thread(target=_copy_lines, args=(process.stdout, sys.stdout, deque(maxlen=0))),
        threading.Thread(target=_copy_lines, args=(process.stderr, sys.stderr, notices)),
    ]
    for reader in readers:
        reader.start()
    try:
        process.wait()
    finally:
        # Still running after Ctrl-C, or after an exception from a signal handler. After SIGINT the
        # launcher gives the workers 3 s.
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait()
        for reader in readers:
            reader.join()
        process.stdout.close()
        process.stderr.close()
    return process.returncode, list(notices)


def _copy_lines(source: IO[bytes], target: TextIO, notices: deque[str]) -> None:
    """Copy lines to `target`; keep in `notices` those from the launcher's own last line on."""
    for raw in source:
        line = raw.decode(errors="replace")
        with contextlib.suppress(OSError, ValueError):
            target.write(line)
            target.flush()
        if line.startswith(_OWN):
            notices.clear()
        notices.append(line.rstrip("\n"))


def _results(store: wire.Server) -> list[Any]:
    """Return the results by rank; RuntimeError if a rank has none."""
    import cloudpickle

    num_workers = int(store.peek("size") or b"0")
    found = []
    for rank in range(num_workers):
        data = collect(f"result/{rank}", store.peek)
        if data is None:
            raise RuntimeError(
                f"rank {rank} exited with code 0 but returned no result: the function must return,"
                " not call sys.exit or os._exit"
            )
        found.append(cloudpickle.loads(data))
    return found
