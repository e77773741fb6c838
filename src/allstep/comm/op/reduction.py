"""The arithmetic of reductions: all operations and dtypes, in terms of the few of a transport.

A transport (Gloo, or shared memory) supports sum, product, minimum, maximum and the bitwise
operations on the `NATIVE` dtypes. Every other reduction becomes a `Recipe`: convert the tensor into
one that the transport supports (`before`), reduce that, and convert the result back (`after`; the
copy into the user's tensor then casts).

```
requested       computed
bool            in uint8 as 0 and 1. Sum is "or", product is "and", as torch adds and multiplies
                bools
int16, uint*    in the next wider integer (uint64: in int64, same bits), truncated at the end: it
                wraps as the narrow type would
complex         sum and mean of real and imaginary parts. A product needs complex numbers: all
                tensors are gathered and multiplied on each rank (`by_hand`)
AVG, floats     sum, then one division. Half precision is summed in float32 and rounded once
AVG, integers   sum in int64, then division towards zero, as NCCL does
PREMUL_SUM      each rank's tensor times the factor, then the sum. Half precision as above.
                Integers need a whole factor
```
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from allstep.errors import CommError

# ReduceOp.RedOpType, which torch's stub declares as an enumeration without members.
Kind = Any

SUM, AVG, PRODUCT, PREMUL_SUM = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.PREMUL_SUM
MIN, MAX, BAND, BOR, BXOR = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR
BITWISE = (BAND, BOR, BXOR)

NATIVE = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}
_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
# The dtype in which a mean or a scaled sum is computed, where the tensor's own dtype would overflow
# or round at each step.
_EXACT = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    **dict.fromkeys(
        (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32), torch.int64
    ),
}
_ON_BOOL = {SUM: MAX, PRODUCT: MIN, MIN: MIN, MAX: MAX, BAND: BAND, BOR: BOR, BXOR: BXOR}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_TOP_BIT = -(2**63)

FOLD: dict[Kind, Callable[..., Tensor]] = {
    SUM: torch.add,
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}

Step = Callable[[Tensor], Tensor]


class Recipe(NamedTuple):
    """How to compute a reduction.

    `kind` is the transport's operation, applied to the result of `before` (None: to the tensor
    itself); `after` converts its result. `by_hand`: gather all tensors and reduce them on each rank
    instead.
    """

    kind: Kind
    before: Step | None = None
    after: Step | None = None
    by_hand: bool = False

    @property
    def is_native(self) -> bool:
        """Whether the transport computes the requested reduction without conversion."""
        return self.before is None and self.after is None and not self.by_hand

    def prepared(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor for the transport. It may share the memory of `tensor`."""
        return (
            self.before(tensor) if self.before else tensor.resolve_conj().resolve_neg()
        ).contiguous()

    def put(self, reduced: Tensor, target: Tensor) -> None:
        """Write the result into the user's tensor, unless it is there already."""
        result = self.after(reduced) if self.after else reduced
        if result.data_ptr() != target.data_ptr():
            target.detach().copy_(result.view(target.shape))


def recipe_for(op: Any, dtype: torch.dtype, size: int) -> Recipe:
    """Return how `size` ranks reduce tensors of `dtype`.

    Raises `CommError` if the operation is not defined for the dtype.
    """
    kind = op.op
    if kind == PREMUL_SUM:
        return _scaled(op.factor, dtype)
    return _recipe(kind, dtype, size)


@lru_cache(maxsize=256)
def _recipe(kind: Kind, dtype: torch.dtype, size: int) -> Recipe:
    if dtype is torch.bool:
        if kind not in _ON_BOOL:
            raise _meaningless(kind, dtype)
        return Recipe(_ON_BOOL[kind], _cast(torch.uint8))
    if dtype in _COMPLEX:
        return _complex(kind, dtype, size)
    if dtype not in NATIVE and dtype not in _WIDER:
        raise CommError(
            f"torch cannot add {dtype}, so {kind.name} of it cannot be reduced: cast it first",
            op=kind.name,
        )
    if kind in BITWISE and dtype.is_floating_point:
        raise _meaningless(kind, dtype)
    if kind == AVG:
        return _mean(dtype, size)
    # As signed numbers with the top bit flipped, they have the same order.
    if dtype is torch.uint64 and kind in (MIN, MAX):
        return Recipe(
            kind, lambda tensor: tensor.to(torch.int64) ^ _TOP_BIT, lambda tensor: tensor ^ _TOP_BIT
        )
    return Recipe(kind, _cast(_WIDER[dtype]) if dtype in _WIDER else None)


def _mean(dtype: torch.dtype, size: int) -> Recipe:
    if dtype.is_floating_point:
        return Recipe(
            SUM, _cast(_EXACT.get(dtype, dtype), copy=False), lambda total: total.div_(size)
        )
    if dtype is torch.uint64:
        raise CommError(
            "AVG of torch.uint64: the sum does not fit into 64 bits: use int64 or float64", op="AVG"
        )
    return Recipe(
        SUM, _cast(torch.int64), lambda total: torch.div(total, size, rounding_mode="trunc")
    )


def _complex(kind: Kind, dtype: torch.dtype, size: int) -> Recipe:
    exact = _EXACT.get(dtype, dtype)
    if kind == SUM:
        return Recipe(SUM, _parts, _joined)
    if kind == AVG:
        return Recipe(
            SUM, lambda tensor: _parts(tensor.to(exact)), lambda total: _joined(total) / size
        )
    if kind == PRODUCT:
        return Recipe(PRODUCT, _cast(exact), by_hand=True)
    raise _meaningless(kind, dtype)


def _parts(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj().contiguous())


def _joined(tensor: Tensor) -> Tensor:
    return torch.view_as_complex(tensor.view(-1, 2))


def _scaled(factor: float | Tensor, dtype: torch.dtype) -> Recipe:
    """Return the recipe of PREMUL_SUM, not cached because the factor changes with each call."""
    if dtype in _COMPLEX:
        return Recipe(
            SUM, lambda tensor: _parts(tensor.to(_EXACT.get(dtype, dtype)) * factor), _joined
        )
    if dtype.is_floating_point and dtype in NATIVE:
        return Recipe(SUM, lambda tensor: tensor.to(_EXACT.get(dtype, dtype)) * factor)
    if dtype is torch.bool or (dtype not in NATIVE and dtype not in _WIDER):
        raise _meaningless(PREMUL_SUM, dtype)
    number = factor.item() if isinstance(factor, Tensor) else factor
    if int(number) != number:
        raise CommError(
            f"PREMUL_SUM of {dtype} needs a whole factor, not {number}: cast to a float dtype"
            " first",
            op="PREMUL_SUM",
        )
    return Recipe(SUM, lambda tensor: tensor.to(torch.int64) * int(number))


def _cast(dtype: torch.dtype, copy: bool = True) -> Step:
    return lambda tensor: tensor.to(dtype, copy=copy)


def _meaningless(kind: Kind, dtype: torch.dtype) -> CommError:
    return CommError(f"{kind.name} is not defined for {dtype}", op=kind.name)


def fold(parts: Sequence[Tensor], kind: Kind) -> Tensor:
    """Reduce the ranks' tensors into the first one, in the given order: same order, same bits."""
    combine, total = FOLD[kind], parts[0]
    for part in parts[1:]:
        combine(total, part, out=total)
    return total
