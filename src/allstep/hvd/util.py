"""The helpers of `horovod.common.util` that scripts import. All of them work before `init()`."""

import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Item = TypeVar("Item")

# Horovod compiled one extension for each framework. Ours are front-ends; which module is the one
# for a framework's name:
_FRONT_ENDS = {"torch": "allstep.torch", "tensorflow": "allstep.keras"}


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a front-end for this framework ("torch", "tensorflow", "mxnet")."""
    module = _FRONT_ENDS.get(ext_base_name)
    found = module is not None and importlib.util.find_spec(module) is not None
    if verbose:
        print(f"{ext_base_name}: {'available' if found else 'allstep has no front-end for it'}")
    return found


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """ImportError when there is no front-end of that name ("horovod.torch").

    Nothing is compiled, so the variable plays no part.
    """
    framework = ext_name.removeprefix("horovod.")
    if not extension_available(framework):
        raise ImportError(
            f"{ext_name} is not available: allstep has front-ends for {', '.join(_FRONT_ENDS)}"
        )


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether this process could use a GPU through that front-end."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def gloo_built(verbose: bool = False) -> bool:
    """True: the road between hosts on CPU is torch's Gloo."""
    return dist.is_gloo_available()


def mpi_built(verbose: bool = False) -> bool:
    """False: MPI may start the ranks, but carries nothing."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """The version of torch's NCCL as one number (2.21.5 is 22105), 0 without it."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built(verbose: bool = False) -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built for ROCm."""
    return torch.version.hip is not None


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for the time of the block; None leaves one as it is."""
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
    """Horovod's switches: on is a whole number above 0; anything else, and nothing, is off."""
    try:
        return int(os.environ.get(name, "0")) > 0
    except ValueError:
        return False


def split_list(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """Consecutive parts of nearly equal length; the first ones are longer by one where it does not
    come out even."""
    each, more = divmod(len(items), num_parts)
    starts = [part * each + min(part, more) for part in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether it is 1, 2, 4, 8 ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: object) -> bool:
    """Whether one can loop over it."""
    return isinstance(x, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether release `ver` ("2.13.0+cpu") is `target` ("1.5.0": three numbers) or later;
    "1.5.0rc1" is earlier."""
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(
            f"versions are compared as text, not {type(ver).__name__} with {type(target).__name__}"
        )
    if target.count(".") != 2:
        raise ValueError(f"target {target!r} is not in the form of major.minor.patch")
    return _release(ver) >= _release(target)


def _release(version: str) -> tuple[list[int], bool]:
    """Its numbers, and whether it is out."""
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
    """A function (op, average) -> op, for a front-end that has `Average` and `Sum`.

    `average` is Horovod's older way to say it.
    """

    def handle_average(op: int | None, average: bool | None) -> int:
        if op is not None and average is not None:
            raise ValueError(f"op={op} and average={average}: op supersedes average, give only op")
        if op is not None:
            return op
        if average is None:
            return int(reduce_ops.Average)
        warnings.warn(
            "average= is deprecated: say op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        return int(reduce_ops.Average if average else reduce_ops.Sum)

    return handle_average
