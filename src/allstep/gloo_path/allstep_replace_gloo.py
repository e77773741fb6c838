"""`allstep run --replace-gloo`: a program that asks torch.distributed for Gloo gets backend
"allstep".

How it gets into a worker: `allstep run` puts this folder first on PYTHONPATH. The folder holds the
metadata of a package with an entry point in the group `torch.backends`, which torch calls at the
end of `import torch` (torch's way to load plugins, since 2.5). So no module of Python's start-up is
shadowed, and a program that never imports torch does not even read this file.

How it works: every group of torch.distributed, the default one, subgroups and those of a
DeviceMesh, is made by one function, `distributed_c10d._new_process_group_helper`. `install` wraps
it. Where the CPU's backend would be Gloo, the group is made by "allstep" and then recorded under
the name that was asked for: `dist.get_backend()` still returns "gloo", as the program and its
framework expect. allstep itself is imported when the first such group is made.

The function is private to torch; a torch without it leaves Gloo in place and reports that.
"""

import functools
import os
import sys
from typing import Any

_OURS = "allstep"
_reported: set[str] = set()


def install() -> None:
    """Wrap torch's maker of groups. torch calls this while it is imported, so it must not raise."""
    import torch.distributed

    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None:
        _report("this torch makes its groups in another way: gloo is not replaced")
    elif not hasattr(make, "__wrapped__"):
        c10d._new_process_group_helper = _replacing(make, c10d)


def _replacing(make: Any, c10d: Any) -> Any:
    """Return `make`, except that groups on Gloo are ours."""

    # torch passes the first four by position in all its versions; behind them they differ.
    @functools.wraps(make)
    def helper(
        size: int, rank: int, global_ranks: Any, backend: Any, *rest: Any, **named: Any
    ) -> Any:
        ours = str(backend).lower() == _OURS or _is_gloo(backend, c10d)
        if ours:
            _register()
        chosen = _OURS if ours else backend
        group, store = make(size, rank, global_ranks, chosen, *rest, **named)
        # A process outside the group gets no store, and torch records nothing for it.
        if ours and store is not None:
            c10d._world.pg_map[group] = (backend, store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(backend))
        return group, store

    return helper


def _is_gloo(backend: Any, c10d: Any) -> bool:
    """Whether Gloo would serve the CPU and, if CUDA is named, Gloo or NCCL would serve it."""
    name = str(backend).lower()
    if name == "undefined" or "gloo" in name:
        config = c10d.BackendConfig(backend)
        served = dict(config.get_device_backend_map())
        on_cpu, on_cuda = served.pop("cpu", None), served.pop("cuda", None)
        if on_cpu == "gloo" and on_cuda in ("gloo", "nccl", None) and not served:
            return True
        name = str(config)
    if name != "fake":
        _report(f"backend {name!r} is left alone: only gloo on the CPU is replaced")
    return False


def _register() -> None:
    """Make the name "allstep" known to torch."""
    try:
        import allstep.comm  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"--replace-gloo: {sys.executable} cannot import allstep ({error}); install it there"
        ) from error


def _report(text: str) -> None:
    """Print a line once, on rank 0."""
    if text not in _reported and os.environ.get("RANK", "0") == "0":
        print(f"allstep: --replace-gloo: {text}", file=sys.stderr, flush=True)
    _reported.add(text)
