"""How many workers a run gets when nobody says, and that nobody says otherwise in a world that has
its workers."""

import os
from importlib.util import find_spec
from pathlib import Path

from allstep.errors import AllstepError, ConfigError
from allstep.machine import allowed_cores
from allstep.train.config.run_config import RunConfig
from allstep.world import World

MOST_WORKERS = 8
FEWEST_SAMPLES = 16


def choose_num_workers(num_gpus: int, num_cores: int, batch: int | None) -> int:
    """One per GPU, else one per core; at most 8, and none with fewer than 16 samples of the global
    `batch` (None: no such limit)."""
    most = MOST_WORKERS if batch is None else min(MOST_WORKERS, batch // FEWEST_SAMPLES)
    return max(1, min(num_gpus or num_cores, most))


def default_num_workers(config: RunConfig) -> int:
    """For `config` on this machine."""
    batch = None if config.batch_per_worker else config.batch or config.optimizer.base_batch
    return choose_num_workers(count_gpus(), allowed_cores(), batch)


def count_gpus() -> int:
    """NVIDIA GPUs that torch could use, found without importing it: its CUDA library, the driver's
    devices, CUDA_VISIBLE_DEVICES."""
    torch = find_spec("torch")
    library = Path(torch.origin or "").parent / "lib" / "libtorch_cuda.so" if torch else None
    if library is None or not library.exists():
        return 0
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        devices
        if visible is None
        else min(devices, len([name for name in visible.split(",") if name.strip()]))
    )


def check_num_workers(asked: int | None, world: World) -> None:
    """A world has the workers it has."""
    if asked is not None and asked != world.size:
        raise ConfigError(
            f"--workers {asked}, but {world.launcher} has started {world.size}: leave --workers"
            f" out, or ask the launcher for {asked}"
        )


def no_result(expected: str) -> AllstepError:
    """Return what to raise when all workers exited with status 0 and left no result.

    A status of 0 is no proof of work: a model's code, or what Python imports at its start, may end
    the process. expected: what the workers should have left.
    """
    return AllstepError(
        f"the workers exited with status 0 without doing their work: expected {expected}, found"
        " none; look for sys.exit or os._exit in the model's code, and in sitecustomize or .pth"
        " files of this Python"
    )
