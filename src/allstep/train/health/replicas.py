"""Comparison of the weights of all ranks, by two numbers of 8 bytes per rank. No step waits for it.

All ranks start with the same weights and apply the same updates, so the weights must stay equal,
bit for bit. A memory error, or a line of the user's code that acts on one rank only, breaks that
silently. So every few hundred steps:

```
step n     start(n)   hash of each tensor
                      -> hash of these hashes, of parameters and of buffers
                      -> start an all_gather of the two
step n+1   finish()   if they differ: gather the hashes of all tensors, as they were at step n,
                      and name the first tensor that differs, and the ranks
```

The hash of a tensor reads its bytes as 64-bit numbers x and folds them, row by row of 1024, until
one number is left (all modulo 2^64):

```
x[r, c]  ->  y[r] = sum over c of x[r, c] * w[c]  ->  the next x[r] = y[r] xor (y[r] >> 32)

w: odd random numbers, different in each fold
```

Each position has a factor of its own, so that differences at two positions do not cancel, as they
would in a plain sum; the shift moves down the high bits, where a product has little room. Integers
add up to the same sum in any order, so the number of threads does not matter. NaNs are equal if
their bits are. Tensors are read in memory order, so the ranks must use the same memory format
(channels-last or not), as they do here.

If the ranks of a host share one copy of the parameters (`shared`), only the first rank of each host
hashes them; the others send 0 for "not hashed". Every rank hashes its own buffers, such as the
running statistics of norms.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from allstep.errors import AllstepError
from allstep.world import World

_ROW = 1024
_FOLDS = 5
"""Number of folds, enough for 2^50 numbers."""
_NOT_HASHED = 0
"""Value that a rank sends instead of the hash of a tensor that another rank hashes."""


class Fingerprint:
    """Comparison of the weights of all ranks.

    `shared` means that the ranks of a host share one copy of the parameters. `start` and `finish`
    are collectives: all ranks call them at the same steps.
    """

    def __init__(self, model: nn.Module, world: World, shared: bool = False) -> None:
        self._model = model
        self._size = world.size
        self._hashes_parameters = not shared or world.local_rank == 0
        self._step = 0
        self._hashes = self._gathered = torch.empty(0)
        self._work: Any = None

    @torch.no_grad()
    def start(self, step: int) -> None:
        """Compute this rank's hashes after the update of `step`, and start gathering them."""
        self.finish()
        self._step = step
        tensors = [tensor for _, tensor in tensors_of(self._model)]
        if not tensors:
            return
        hashes = [self._hash_of(tensor).to(tensors[0].device) for tensor in tensors]
        self._hashes = torch.stack(hashes)
        mine = self._summary(tensors)
        self._gathered = mine.new_empty((self._size, *mine.shape))
        self._work = dist.all_gather([*self._gathered], mine, async_op=True)

    def finish(self) -> None:
        """Wait for the hashes of `start` and compare them.

        Call it at a later step, or at the end of the run. Raise AllstepError, on all ranks, if the
        weights differed.
        """
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if any(_differ(values) for values in self._gathered.T.tolist()):
            raise AllstepError(self._difference())

    def _summary(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the hash of the parameters' hashes and that of the buffers' hashes."""
        learned = torch.tensor(
            [isinstance(tensor, nn.Parameter) for tensor in tensors], device=self._hashes.device
        )
        of_parameters = _folded(self._hashes * learned) * self._hashes_parameters
        return torch.stack([of_parameters, _folded(self._hashes * ~learned)])

    def _hash_of(self, tensor: Tensor) -> Tensor:
        """Return the hash of a tensor, or `_NOT_HASHED` if another rank hashes it."""
        if isinstance(tensor, nn.Parameter) and not self._hashes_parameters:
            return tensor.new_full((), _NOT_HASHED, dtype=torch.int64)
        return hash_of(tensor)

    def _difference(self) -> str:
        """Gather the hashes of all tensors and return the error message."""
        gathered = self._hashes.new_empty((self._size, len(self._hashes)))
        dist.all_gather([*gathered], self._hashes)
        by_tensor = gathered.T.tolist()
        differ = [number for number, values in enumerate(by_tensor) if _differ(values)]
        tensors = list(tensors_of(self._model))
        name, tensor = tensors[differ[0]]
        odd = _odd_ones(by_tensor[differ[0]])
        return (
            f"the weights are not equal on all workers after step {self._step}: the first of"
            f" {len(differ)} tensors (of {len(tensors)}) that differ is {_kind(tensor)} {name!r},"
            f" on {_ranks(odd)}. {_cause(tensor)}, or the memory or processor there is defective."
            " Checkpoints since the last comparison may be wrong too: resume from one before it"
        )


def _kind(tensor: Tensor) -> str:
    """Return whether a tensor is a parameter or a buffer, for a message."""
    return "the parameter" if isinstance(tensor, nn.Parameter) else "the buffer"


def _cause(tensor: Tensor) -> str:
    """Return the cause that is more probable than a hardware error, for a message."""
    if isinstance(tensor, nn.Parameter):
        return (
            "Either your code changes weights on some ranks only (check random numbers and"
            " conditions on the rank)"
        )
    return (
        "Buffers that a training step changes become their mean over the workers, so either your"
        " code changes this one elsewhere (sum it over the ranks there, or store it in an"
        " attribute that is no buffer)"
    )


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of parameters and buffers in the order of the modules, each once."""
    seen = set()
    for prefix, module in model.named_modules():
        own = [
            *module.named_parameters(prefix, recurse=False),
            *module.named_buffers(prefix, recurse=False),
        ]
        for name, tensor in own:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def hash_of(tensor: Tensor) -> Tensor:
    """Return a hash of all bytes of the tensor (int64, no dimensions)."""
    octets = _in_a_row(tensor.detach()).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    numbers = octets[:whole].view(torch.int64)
    if whole < octets.numel():
        numbers = torch.cat([numbers, octets[whole:].to(torch.int64)])
    return _folded(numbers)


def _in_a_row(tensor: Tensor) -> Tensor:
    """Return a flat view in memory order if the tensor is dense, else a flat copy.

    The result starts at a multiple of 8 bytes, as 64-bit numbers must.
    """
    dense = tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.contiguous().view(-1)
    return flat.clone() if flat.storage_offset() * flat.element_size() % 8 else flat


def _folded(numbers: Tensor) -> Tensor:
    """Return the hash of a flat tensor of 64-bit numbers."""
    for weights in _weights(numbers.device):
        whole = numbers.numel() // _ROW * _ROW
        rest = numbers[whole:]
        last = _times(rest.view(1, -1), weights[: rest.numel()])
        numbers = torch.cat([_times(numbers[:whole].view(-1, _ROW), weights), last])
        numbers = numbers ^ (numbers >> 32)
        if numbers.numel() == 1:
            # Not 0, which means "not hashed".
            return numbers[0] | 1
    raise AssertionError("more numbers than any memory holds")


def _times(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the product of a matrix and a vector; torch has it for integers only on the CPU."""
    return rows.mv(weights) if rows.device.type == "cpu" else (rows * weights).sum(1)


@cache
def _weights(device: torch.device) -> Tensor:
    """Return the factors of all folds.

    They come from Python's generator, so they are the same with every version of torch.
    """
    draw = random.Random(8)
    rows = [[draw.getrandbits(63) | 1 for _ in range(_ROW)] for _ in range(_FOLDS)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _differ(values: Sequence[int]) -> bool:
    """Return whether ranks have different hashes."""
    return len({value for value in values if value != _NOT_HASHED}) > 1


def _odd_ones(values: Sequence[int]) -> dict[int, int]:
    """Return rank and hash of the ranks that differ from the majority.

    In a tie the first rank's hash counts as the majority.
    """
    # The counter has the order of the ranks, which decides a tie.
    counts = Counter(value for value in values if value != _NOT_HASHED)
    usual = counts.most_common(1)[0][0]
    return {rank: value for rank, value in enumerate(values) if value not in (usual, _NOT_HASHED)}


def _ranks(odd: dict[int, int]) -> str:
    """Return the ranks that differ, for a message."""
    names = ", ".join(str(rank) for rank in odd)
    alike = "" if len(odd) == 1 or len(set(odd.values())) > 1 else ", which agree with each other"
    return f"rank{'s' if len(odd) > 1 else ''} {names}{alike}"
