"""The worker's share of cores for TensorFlow, XLA and MXNet.

TensorFlow and XLA use all cores of the machine in every worker unless a variable limits them; each
reads its variable when it runs the first operation. `allstep run` sets the variables before the
worker starts. Under mpirun, srun and torchrun `hvd.init()` sets them, in time for a framework that
has run nothing yet.

MXNet is another case: OpenMP reads OMP_NUM_THREADS when its library is loaded, which MXNet and
torch share. So `take_openmp` sets this one just before MXNet is imported, to an estimate: `init`
asks all workers for their cores, but comes later.

| variable | what it limits |
|---|---|
| `TF_NUM_INTRAOP_THREADS` | the threads of one TensorFlow operation |
| `PJRT_NPROC` | XLA's thread pools, in JAX |
| `XLA_FLAGS` | for one thread: `--xla_cpu_multi_thread_eigen=false`, after the user's flags |
| `OMP_NUM_THREADS` | MXNet, and torch before `init` |

In jaxlib 0.10.2 only `PJRT_NPROC` limits a matrix product; the flag is for older versions. With
more than one thread the flag would leave cores idle, so it is left out. TensorFlow's other pool,
for independent operations, is not limited: an operation that waits for other ranks holds one of its
threads.

A value that the user set stays. `ALLSTEP_FRAMEWORK_THREADS` marks a value as ours, so that a run
started by a worker of another run sets its own.
"""

import os
import sys
from collections.abc import Mapping

from allstep import machine
from allstep.console.escape import print_notice
from allstep.errors import WorldError
from allstep.world import World

_MARK = "ALLSTEP_FRAMEWORK_THREADS"
_TENSORFLOW = "TF_NUM_INTRAOP_THREADS"
_XLA_POOLS = "PJRT_NPROC"
_XLA_FLAGS = "XLA_FLAGS"
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"

# Variables that `take` and `take_openmp` changed: the value before (None: not set), and ours.
_changed: dict[str, tuple[str | None, str]] = {}


def variables(env: Mapping[str, str], share: int) -> dict[str, str]:
    """Return the variables that limit TensorFlow and XLA to `share` threads.

    env: environment of the worker. Values in it that the user set are left out of the result.
    """
    found = {_MARK: str(share)}
    if _is_ours(env, _TENSORFLOW):
        found[_TENSORFLOW] = str(share)
    # XLA reads NPROC if PJRT_NPROC is not set.
    if _is_ours(env, _XLA_POOLS) and not env.get("NPROC"):
        found[_XLA_POOLS] = str(share)
    return found | _flags(env, share)


def of_worker(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a worker that has OMP_NUM_THREADS in `env`; none without a number.

    The number may be the user's own: it then counts for all frameworks, up to the allowed cores.
    """
    threads = env.get("OMP_NUM_THREADS", "")
    if not threads.isdecimal() or not int(threads):
        return {}
    return variables(env, min(int(threads), machine.allowed_cores()))


def take(share: int, speaks: bool) -> None:
    """Set the variables of this process; print a line if TensorFlow already runs with more threads.

    share: threads of this worker. speaks: whether this rank prints the line, so that one rank does
    it for all.
    """
    share = min(share, machine.allowed_cores())
    running = _threads_of_running_tensorflow(share)
    if speaks and running is not None and running > share:
        print_notice(
            f"TensorFlow already runs with {running} threads in each worker, more than the worker's"
            f" share of {share}: call hvd.init() before the first operation of TensorFlow, or set"
            f" {_TENSORFLOW}={share}"
        )
    _set(_openmp(os.environ, share) | variables(os.environ, share))


def take_openmp() -> None:
    """Set OMP_NUM_THREADS of this process to its estimated share of the cores of its host.

    For MXNet, before it is imported. A no-op if the variable is set, for a single worker, and where
    the launcher's variables contradict each other, which `init` reports.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return
    try:
        num_workers = World.detect().local_size
    except WorldError:
        return
    if num_workers > 1:
        _set(machine.threads_by_allstep(machine.estimated_share(num_workers)))


def _set(chosen: Mapping[str, str]) -> None:
    """Set variables of this process; remember the values before the first change."""
    for name, value in chosen.items():
        before, _ = _changed.get(name, (os.environ.get(name), value))
        _changed[name] = before, value
    os.environ.update(chosen)


def give_back() -> None:
    """Restore the variables that were changed here, for processes that are started later.

    A variable that the script has changed since then stays.
    """
    for name, (before, ours) in _changed.items():
        if os.environ.get(name) != ours:
            continue
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    _changed.clear()


def _is_ours(env: Mapping[str, str], name: str) -> bool:
    """Return whether a variable is not set, is empty, or has the number that allstep set."""
    return env.get(name, "") in ("", env.get(_MARK))


def _flags(env: Mapping[str, str], share: int) -> dict[str, str]:
    """Return XLA_FLAGS; nothing if it needs no change."""
    given = env.get(_XLA_FLAGS, "")
    users = given.removesuffix(_ONE_THREAD).rstrip() if env.get(_MARK) == "1" else given
    # XLA reads a value that does not start with "-" as the name of a file with flags.
    is_file = bool(users) and not users.lstrip().startswith("-")
    if share == 1 and not is_file and "xla_cpu_multi_thread_eigen" not in users:
        users = f"{users} {_ONE_THREAD}".lstrip()
    return {_XLA_FLAGS: users} if users != given else {}


def _openmp(env: Mapping[str, str], share: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS with the mark of `machine`; nothing if the user set it."""
    return {} if machine.threads_by_user(env) else machine.threads_by_allstep(share)


def _threads_of_running_tensorflow(share: int) -> int | None:
    """Return the threads of an operation of TensorFlow if it runs and the user set no number.

    If it is imported but has run nothing yet, set its number to `share` and return None.
    """
    threading = getattr(getattr(sys.modules.get("tensorflow"), "config", None), "threading", None)
    if threading is None or threading.get_intra_op_parallelism_threads():
        return None
    try:
        threading.set_intra_op_parallelism_threads(_wanted(share))
    # TensorFlow's answer once it runs.
    except RuntimeError:
        return _read_by_tensorflow()
    return None


def _wanted(share: int) -> int:
    """Return the number for TensorFlow's own call: 0, which leaves it to the user's variable."""
    return share if _is_ours(os.environ, _TENSORFLOW) else 0


def _read_by_tensorflow() -> int | None:
    """Return the number that a running TensorFlow found in its variable, else all its cores.

    None: the user set the variable.
    """
    if not _is_ours(os.environ, _TENSORFLOW):
        return None
    return int(os.environ.get(_TENSORFLOW) or len(os.sched_getaffinity(0)))
