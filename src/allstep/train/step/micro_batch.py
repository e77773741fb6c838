"""The largest micro-batch of a growing batch that surely fits into the memory of a worker.

```
bytes of a sample     (bytes that autograd keeps of a forward pass of 4 samples, minus those of 2)
                      / 2, times 2, because the backward pass creates gradients of the same sizes
memory of a worker    that of its GPU, or an equal share of the total memory of its host or cgroup
room                  the number of samples whose bytes fill a quarter of that memory; weights,
                      optimizer state, images and other processes use the rest
```

The result does not depend on the memory that is free or in use at the moment. So the same run on
the same machine always has the same number of micro-batches, and hence the same bits. A checkpoint
stores the number, so a resumed run uses it on any machine.

The room of a model with batch norms is 0 (micro-batches do not grow): larger micro-batches would
change the statistics of the norms, and so the run.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from allstep import machine
from allstep.world import World

_MEMORY_FRACTION = 0.25
_WITH_GRADIENTS = 2
# Samples of the two forward passes that are compared.
_FEW, _MANY = 2, 4


Forward = Callable[[nn.Module, int], Tensor]
"""Returns the output of a model for a number of samples."""


def samples_at_once(model: nn.Module, forward: Forward, nbytes: int) -> int:
    """Return how many samples can be computed at once in a memory of `nbytes`; 0 if unknown.

    The model is not changed.
    """
    if any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        return 0
    try:
        with torch.random.fork_rng(devices=[]):
            each = bytes_of_sample(copy.deepcopy(model), forward)
    # A user's model may raise anything: this is the first time that it gets two samples.
    except Exception:
        return 0
    return int(_MEMORY_FRACTION * nbytes / (_WITH_GRADIENTS * each)) if each > 0 else 0


def bytes_of_sample(model: nn.Module, forward: Forward) -> int:
    """Return the bytes that autograd keeps for one more sample until its backward pass.

    Tensors that do not grow with the number of samples, such as weights, do not count.
    """
    return (_kept(model, forward, _MANY) - _kept(model, forward, _FEW)) // (_MANY - _FEW)


def _kept(model: nn.Module, forward: Forward, count: int) -> int:
    """Return the bytes that autograd keeps of a forward pass; a shared storage counts once."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(model, count)
    return sum(each.untyped_storage().nbytes() for each in kept.values())


def memory_of_worker(world: World, device: torch.device) -> int:
    """Return the memory of a worker in bytes: that of its GPU, else its share of the host's.

    It is the total memory, whether it is free or in use.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    found = machine.memory()
    return min(found.total, found.limit or found.total) // world.local_size
