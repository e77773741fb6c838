"""A process that has imported torch once and forks ranks from itself, so that a rank of a test
starts in milliseconds.

Started by `ranks.py` with one end of a socket pair. For each request it forks the ranks, answers
with their process numbers, and answers again with their exit statuses when all have ended. Each
rank is its own session, writes what it prints to `<folder>/<rank>.out` and its pickled result to
`<folder>/<rank>.result`. If the test run dies, the server dies, and its ranks with it.
"""

import ctypes
import gc
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

# Half a million objects come and stay: collecting them takes as long as making them.
gc.disable()

import cloudpickle  # noqa: E402
import numpy  # noqa: E402
import torch  # noqa: E402
import torch.distributed  # noqa: E402

import allstep.comm  # noqa: E402

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become_rank(request: dict[str, Any], rank: int) -> int:
    """Runs in the forked child: the test's function, as one rank of its world."""
    os.setsid()
    die_with_parent()
    folder = Path(request["folder"])
    out = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(request["env"][rank])
    os.chdir(folder)
    sys.path[:] = request["path"]
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)
    try:
        function, args = pickle.loads(request["call"])
        result = function(*args)
        (folder / f"{rank}.result").write_bytes(cloudpickle.dumps(result))
        allstep.comm.shutdown()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def fork_rank(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = become_rank(request, rank)
        finally:
            os._exit(code)
    return pid


def main() -> None:
    die_with_parent()
    torch.optim.SGD(
        [torch.nn.Parameter(torch.zeros(1))], 0.1
    )  # the first optimizer imports half of torch
    # A collection in a rank omits them, too: their pages stay shared.
    gc.freeze()
    gc.enable()
    link = multiprocessing.connection.Connection(int(sys.argv[1]))
    link.send("ready")
    while True:
        try:
            request = link.recv()
        except EOFError:
            return
        pids = [fork_rank(request, rank) for rank in range(len(request["env"]))]
        link.send(pids)
        link.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


if __name__ == "__main__":
    main()
