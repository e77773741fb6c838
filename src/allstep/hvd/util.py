"""The helpers of `horovod.common.util` that scripts import. All of them work before `init()`."""

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from allstep.hvd.frameworks import FRONT_ENDS, Framework

Item = TypeVar("Item")
Built = TypeVar("Built", bool, int)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether there is a front-end for a framework and the framework is installed.

    `ext_base_name`: "torch", "tensorflow", "keras" or "mxnet". `verbose`: also print the result
    (default: False).
    """
    framework = FRONT_ENDS.get(ext_base_name)
    version = framework.version if framework else None
    if verbose:
        print(f"{ext_base_name}: {_state(framework, version)}")
    return version is not None


def _state(framework: Framework | None, version: str | None) -> str:
    if framework is None:
        return f"allstep has no front-end for it, only for {', '.join(FRONT_ENDS)}"
    if version is None:
        return f"{framework.name} is not installed: pip install {framework.install}"
    return f"available, {framework.name} {version}"


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError if a front-end such as "horovod.torch" cannot be used.

    Nothing is compiled, so `ext_env_var` and `pkg_path` have no effect.
    """
    framework = FRONT_ENDS.get(ext_name.removeprefix("horovod."))
    version = framework.version if framework else None
    if version is None:
        raise ImportError(f"{ext_name} is not available: {_state(framework, version)}")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether this process could use a GPU through that front-end."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


# The functions below are the same for all front-ends, since torch moves the data of all of them.


def _reported(built: Built, library: str, verbose: bool) -> Built:
    """Return `built`; if `verbose`, print it for each front-end whose framework is installed."""
    if verbose:
        for name in filter(extension_available, FRONT_ENDS):
            print(f"Extension {name} was {'' if built else 'NOT '}built with {library}.")
    return built


def gloo_built(verbose: bool = False) -> bool:
    """Return whether torch has Gloo, the transport between hosts on CPU."""
    return _reported(dist.is_gloo_available(), "Gloo", verbose)


def mpi_built(verbose: bool = False) -> bool:
    """Return False: MPI may launch the ranks, but transports no data."""
    return _reported(False, "MPI", verbose)


def nccl_built(verbose: bool = False) -> int:
    """Return the version of torch's NCCL as one number (2.21.5 is 22105), 0 without NCCL."""
    return _reported(_nccl_version(), "NCCL", verbose)


def _nccl_version() -> int:
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built(verbose: bool = False) -> bool:
    """Return False: IBM's DDL is not used."""
    return _reported(False, "DDL", verbose)


def ccl_built(verbose: bool = False) -> bool:
    """Return False: oneCCL is not used."""
    return _reported(False, "CCL", verbose)


def cuda_built() -> bool:
    """Return whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built for ROCm."""
    return torch.version.hip is not None


def sycl_built() -> bool:
    """Return False: SYCL is not used. Horovod's examples after 0.28.1 ask for it."""
    return False


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for the duration of the block; None leaves one unchanged."""
    changed = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old


def env_flag(name: str) -> bool:
    """Return whether one of Horovod's switches is on: an integer above 0. Anything else is off."""
    try:
        return int(os.environ.get(name, "0")) > 0
    except ValueError:
        return False


def split_list(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """Split a list into consecutive parts; the first parts are longer by one if it is uneven."""
    each, more = divmod(len(items), num_parts)
    starts = [part * each + min(part, more) for part in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether it is 1, 2, 4, 8 ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: object) -> bool:
    """Return whether an object is iterable."""
    return isinstance(x, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether release `ver` ("2.13.0+cpu") is `target` ("1.5.0": three numbers) or later.

    A pre-release such as "1.5.0rc1" is earlier than "1.5.0".
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(
            f"versions are compared as text, not {type(ver).__name__} with {type(target).__name__}"
        )
    if target.count(".") != 2:
        raise ValueError(f"target {target!r} is not in the form of major.minor.patch")
    return _release(ver) >= _release(target)


def _release(version: str) -> tuple[list[int], bool]:
    """Return the numbers of a version, and whether it is a final release."""
    text = version.partition("+")[0].removeprefix("v")
    found = re.match(r"\d+(\.\d+)*", text)
    if found is None:
        raise ValueError(f"{version!r} is not a version: it does not begin with a number")
    numbers = [int(each) for each in found[0].split(".")]
    rest = text[found.end() :].lstrip("._-")
    return numbers + [0] * (4 - len(numbers)), not rest or rest.startswith("post")


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,
) -> Callable[[int | None, bool | None], int]:
    """Return a function (op, average) -> op, for a front-end that has `Average` and `Sum`.

    `average` is Horovod's older argument for the same choice.
    """

    def handle_average(op: int | None, average: bool | None) -> int:
        if op is not None and average is not None:
            raise ValueError(f"op={op} and average={average}: op supersedes average, give only op")
        if op is not None:
            return op
        if average is None:
            return int(reduce_ops.Average)
        warnings.warn(
            "average= is deprecated: use op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        return int(reduce_ops.Average if average else reduce_ops.Sum)

    return handle_average
