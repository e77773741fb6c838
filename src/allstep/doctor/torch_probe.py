"""torch, looked at from a process of its own: an import that hangs, crashes or is killed must not
take the doctor with it.

`look` starts this module; as a program it imports torch and prints what it found as a line of JSON.
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
    """What torch says of itself. `error` is set, and the rest empty, when it cannot be imported."""

    version: str | None = None
    error: str | None = None
    backends: dict[str, bool] = field(default_factory=dict)
    cuda: str | None = None  # the CUDA (or ROCm) version that torch was built for
    devices: list[str] = field(default_factory=list)
    device_error: str | None = None
    runtime_folder_error: str | None = None


class Look:
    """An import of torch under way; `result` waits for it."""

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
        try:
            out, err = self._process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return Engine(error=f"`import torch` did not end within {_SECONDS:.0f} s")
        lines = [line for line in out.splitlines() if line.startswith(_MARK)]
        if lines:
            return Engine(**json.loads(lines[-1].removeprefix(_MARK)))
        last = (err.strip() or "it said nothing").splitlines()[-1]
        code = self._process.returncode
        return Engine(
            error=f"{last} (exit code {code})"
            if code >= 0
            else f"{last} (killed by signal {-code})"
        )


def _describe() -> Engine:
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
    """The accelerators that torch can use, and why CUDA cannot be used where torch was built for
    it."""
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
    try:
        from allstep.comm.join.rendezvous import runtime_folder

        runtime_folder()
    except Exception as error:
        return str(error)
    return None


if __name__ == "__main__":
    print(_MARK + json.dumps(asdict(_describe())))
