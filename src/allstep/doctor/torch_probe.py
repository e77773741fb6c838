"""Facts about torch, from a separate process.

An import of torch that hangs, crashes or is killed must not end the doctor. `Look` starts this
module as a program, which imports torch and prints the facts as a line of JSON.
"""

import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from typing import Any

from allstep.process.python import run_module

_SECONDS = 60.0
_MARK = "allstep-doctor-engine "


@dataclass(frozen=True)
class Engine:
    """Facts about torch. If it cannot be imported, `error` is set and the rest is empty."""

    version: str | None = None
    error: str | None = None
    """Reason why torch cannot be imported."""
    backends: dict[str, bool] = field(default_factory=dict)
    """Backends of torch.distributed, and whether this build has them."""
    cuda: str | None = None
    """CUDA (or ROCm) version that torch was built for; None: CPU only."""
    devices: list[str] = field(default_factory=list)
    """Accelerators that torch can use."""
    device_error: str | None = None
    """Reason why CUDA cannot be used although torch was built for it."""
    runtime_folder_error: str | None = None
    """Reason why the folder of the rendezvous under mpirun and srun cannot be used."""


class Look:
    """A running import of torch in another process; `result` waits for it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            run_module("allstep.doctor.torch_probe"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def result(self) -> Engine:
        """Wait for the import and return the facts, or the error of the process."""
        try:
            out, err = self._process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return Engine(error=f"`import torch` did not end within {_SECONDS:.0f} s")
        lines = [line for line in out.splitlines() if line.startswith(_MARK)]
        if lines:
            return Engine(**json.loads(lines[-1].removeprefix(_MARK)))
        last = (err.strip() or "no output").splitlines()[-1]
        code = self._process.returncode
        return Engine(
            error=f"{last} (exit code {code})"
            if code >= 0
            else f"{last} (killed by signal {-code})"
        )


def _describe() -> Engine:
    """Import torch and return the facts about it."""
    import torch
    import torch.distributed as dist

    available = {"gloo": False, "nccl": False, "mpi": False, "ucc": False}
    if dist.is_available():
        available = {
            name: bool(getattr(dist, f"is_{name}_available", lambda: False)()) for name in available
        }
    devices, error = _devices(torch)
    built_for = torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else None)
    return Engine(
        version=torch.__version__,
        backends=available,
        cuda=built_for,
        devices=devices,
        device_error=error,
        runtime_folder_error=_runtime_folder_error(),
    )


def _devices(torch: Any) -> tuple[list[str], str | None]:
    """Return the usable accelerators, and the error of CUDA if torch was built for it."""
    found = [
        f"cuda:{index} {torch.cuda.get_device_name(index)}"
        for index in range(torch.cuda.device_count())
    ]
    for name in ("xpu", "mps"):
        module = getattr(torch, name, None)
        if module is not None and getattr(module, "is_available", lambda: False)():
            found.append(name)
    error = None
    if torch.version.cuda and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as reason:
            error = str(reason).splitlines()[0]
    return found, error


def _runtime_folder_error() -> str | None:
    """Return the reason why the run-time folder cannot be used; None if it can."""
    try:
        from allstep.comm.join.rendezvous import runtime_folder

        runtime_folder()
    except Exception as error:
        return str(error)
    return None


if __name__ == "__main__":
    print(_MARK + json.dumps(asdict(_describe())))
