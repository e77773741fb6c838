"""The default number of workers of a run, and checks of a number that the user requests."""

import os
from importlib.util import find_spec
from pathlib import Path

from allstep.errors import AllstepError, ConfigError
from allstep.machine import allowed_cores
from allstep.train.config.run_config import RunConfig
from allstep.world import World

MAX_WORKERS = 8
MIN_SAMPLES = 16
"""Samples of a batch that each worker gets at least."""


def choose_num_workers(num_gpus: int, num_cores: int, batch: int | None) -> int:
    """Return one worker per GPU, else one per core, but at most 8.

    Each worker gets at least 16 samples of the global `batch`; None means that this does not limit
    the number.
    """
    limit = MAX_WORKERS if batch is None else min(MAX_WORKERS, batch // MIN_SAMPLES)
    return max(1, min(num_gpus or num_cores, limit))


def default_num_workers(config: RunConfig) -> int:
    """Return the number of workers for `config` on this machine if the user requests none."""
    batch = None if config.batch_per_worker else config.batch or config.optimizer.base_batch
    return choose_num_workers(count_gpus(), allowed_cores(), batch)


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that torch can use, without importing torch.

    Depends on torch's CUDA library, the driver's device files and CUDA_VISIBLE_DEVICES.
    """
    torch = find_spec("torch")
    library = Path(torch.origin or "").parent / "lib" / "libtorch_cuda.so" if torch else None
    if library is None or not library.exists():
        return 0
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    return min(devices, len([name for name in visible.split(",") if name.strip()]))


def check_num_workers(asked: int | None, world: World) -> None:
    """Raise ConfigError if `asked`, the value of --workers, differs from the size of the world."""
    if asked is not None and asked != world.size:
        raise ConfigError(
            f"--workers {asked}, but {world.launcher} has started {world.size}: omit --workers, or"
            f" start {asked} workers with the launcher"
        )


def no_result(expected: str) -> AllstepError:
    """Return the error to raise if all workers exited with status 0 but left no result.

    An exit status of 0 does not prove that a worker finished: the code of a model, or modules that
    Python imports at its start, may end the process. `expected` names the missing result.
    """
    return AllstepError(
        f"the workers exited with status 0 without doing their work: expected {expected}, found"
        " none; look for sys.exit or os._exit in the model's code, and in sitecustomize or .pth"
        " files of this Python"
    )
