"""Programs of the system that a run may use: their path and version.

All of them are started at once, with a timeout.
"""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_SECONDS = 5.0


@dataclass(frozen=True)
class Program:
    """A program that the PATH may have."""

    name: str
    path: str | None
    """Its file; None: not installed."""
    version: str | None = None
    """Its version, as the program prints it; None if unknown."""
    error: str | None = None
    """Reason why the version is unknown."""


_ASKED = {
    "mpirun": ["--version"],
    "srun": ["--version"],
    "ssh": ["-V"],
    "nvidia-smi": ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
}


def programs() -> dict[str, Program]:
    """Return every program that a run may use, by name."""
    with ThreadPoolExecutor(len(_ASKED)) as pool:
        return dict(zip(_ASKED, pool.map(find, _ASKED), strict=True))


def find(name: str) -> Program:
    """Find a program on the PATH and run it for its version."""
    path = shutil.which(name)
    if path is None:
        return Program(name, None)
    try:
        return Program(name, path, version=_version(path, _ASKED.get(name, ["--version"])))
    except subprocess.TimeoutExpired:
        return Program(name, path, error=f"did not answer within {_SECONDS:.0f} s")
    except (OSError, subprocess.SubprocessError) as error:
        return Program(name, path, error=str(error))


def _version(path: str, arguments: list[str]) -> str:
    """Return the version that the program prints; raise SubprocessError if it fails."""
    done = subprocess.run(
        [path, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SECONDS,
        env={**os.environ, "LC_ALL": "C", "RES_OPTIONS": "timeout:1 attempts:1"},
    )
    output = (done.stdout or done.stderr).strip()
    if "configuration source" in output:
        raise subprocess.SubprocessError("installed, but no Slurm is configured on this machine")
    if done.returncode:
        raise subprocess.SubprocessError(
            output.partition("\n")[0] or f"ended with exit code {done.returncode}"
        )
    # MPICH's first line does not have the version.
    hydra = re.search(r"^\s*Version:\s*(\S+)", output, re.MULTILINE)
    if "HYDRA" in output and hydra:
        return f"MPICH {hydra[1]}"
    return output if "nvidia" in path else output.partition("\n")[0]


def gpus(found: dict[str, Program]) -> list[str]:
    """Return one line per GPU that NVIDIA's driver lists: name, memory, driver version."""
    lines = (found["nvidia-smi"].version or "").splitlines()
    return [line.strip() for line in lines if line.count(",") == 2]
