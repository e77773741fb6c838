"""Programs of the system that a run may use: which one the PATH finds, and its version.

All are asked at once, with a time limit.
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
    """`path` None: not installed. `version`: in its own words, or `error`: why it did not say."""

    name: str
    path: str | None
    version: str | None = None
    error: str | None = None


_ASKED = {
    "mpirun": ["--version"],
    "srun": ["--version"],
    "ssh": ["-V"],
    "nvidia-smi": ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
}


def programs() -> dict[str, Program]:
    """Every program that we know how to use."""
    with ThreadPoolExecutor(len(_ASKED)) as pool:
        return dict(zip(_ASKED, pool.map(find, _ASKED), strict=True))


def find(name: str) -> Program:
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
    done = subprocess.run(
        [path, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SECONDS,
        env={**os.environ, "LC_ALL": "C", "RES_OPTIONS": "timeout:1 attempts:1"},
    )
    said = (done.stdout or done.stderr).strip()
    if "configuration source" in said:
        raise subprocess.SubprocessError("installed, but no Slurm is configured on this machine")
    if done.returncode:
        raise subprocess.SubprocessError(
            said.partition("\n")[0] or f"ended with exit code {done.returncode}"
        )
    hydra = re.search(
        r"^\s*Version:\s*(\S+)", said, re.MULTILINE
    )  # MPICH's first line says nothing
    if "HYDRA" in said and hydra:
        return f"MPICH {hydra[1]}"
    return said if "nvidia" in path else said.partition("\n")[0]


def gpus(found: dict[str, Program]) -> list[str]:
    """The GPUs that NVIDIA's driver knows, a line each."""
    lines = (found["nvidia-smi"].version or "").splitlines()
    return [line.strip() for line in lines if line.count(",") == 2]
