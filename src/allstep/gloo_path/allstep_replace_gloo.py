"""`allstep run --replace-gloo`: a program that requests Gloo uses backend "allstep" instead.

Loading: `allstep run` puts this folder first on PYTHONPATH. The folder holds the metadata of a
package with an entry point in the group `torch.backends`, which torch calls at the end of `import
torch` (its plugin mechanism since 2.5). So no start-up module of Python is shadowed, and a program
that never imports torch does not even read this file.

Mechanism: one function of torch, `distributed_c10d._new_process_group_helper`, makes every process
group: the default one, subgroups and those of a DeviceMesh. `install` wraps it. Where the CPU's
backend would be Gloo, "allstep" makes the group, which is then recorded under the requested name:
`dist.get_backend()` still returns "gloo", as the program and its framework expect. allstep itself
is imported when the first such group is made.

The function is private to torch. If a version of torch does not have it, Gloo stays in place and a
line reports that.
"""

import functools
import os
import sys
from typing import Any

_OURS = "allstep"
_reported: set[str] = set()


def install() -> None:
    """Wrap torch's function that makes process groups.

    torch calls this during its own import, so it must not raise.
    """
    import torch.distributed

    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None:
        _report("this version of torch has no _new_process_group_helper: gloo is not replaced")
    elif not hasattr(make, "__wrapped__"):
        c10d._new_process_group_helper = _replacing(make, c10d)


def _replacing(make: Any, c10d: Any) -> Any:
    """Return `make` wrapped so that groups on Gloo become groups on "allstep"."""

    # All versions of torch pass the first four arguments by position; the others differ.
    @functools.wraps(make)
    def helper(
        size: int, rank: int, global_ranks: Any, backend: Any, *rest: Any, **named: Any
    ) -> Any:
        ours = str(backend).lower() == _OURS or _is_gloo(backend, c10d)
        if ours:
            _register()
        chosen = _OURS if ours else backend
        group, store = make(size, rank, global_ranks, chosen, *rest, **named)
        # For a process outside the group there is no store, and torch records nothing.
        if ours and store is not None:
            c10d._world.pg_map[group] = (backend, store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(backend))
        return group, store

    return helper


def _is_gloo(backend: Any, c10d: Any) -> bool:
    """Return whether Gloo would serve the CPU, and Gloo or NCCL would serve CUDA if named."""
    name = str(backend).lower()
    if name == "undefined" or "gloo" in name:
        config = c10d.BackendConfig(backend)
        served = dict(config.get_device_backend_map())
        on_cpu, on_cuda = served.pop("cpu", None), served.pop("cuda", None)
        if on_cpu == "gloo" and on_cuda in ("gloo", "nccl", None) and not served:
            return True
        name = str(config)
    if name != "fake":
        _report(f"backend {name!r} is not replaced: only gloo on the CPU is")
    return False


def _register() -> None:
    """Register the backend "allstep" with torch."""
    try:
        # The import itself registers the backend.
        import allstep.comm  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"--replace-gloo: {sys.executable} cannot import allstep ({error}); install it there"
        ) from error


def _report(text: str) -> None:
    """Print a line on standard error, once and on rank 0 only."""
    if text not in _reported and os.environ.get("RANK", "0") == "0":
        print(f"allstep: --replace-gloo: {text}", file=sys.stderr, flush=True)
    _reported.add(text)
