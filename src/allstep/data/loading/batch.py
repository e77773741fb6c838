"""The batch that a loader returns: one rank's share of a global batch, as tensors.

```
batch memory   (n, height, width, channels) uint8, contiguous    filled by the loader's workers
Batch.data     (n, channels, height, width), the same memory     channels-last strides, no copy
```
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from allstep.data.order import Numbers


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch."""

    data: torch.Tensor
    """Images as (n, channels, height, width), or the source's arrays without a transform."""
    target: torch.Tensor
    """Targets of the samples, first dimension n; class numbers are int64."""
    samples: Numbers
    """Numbers of the samples within their dataset."""
    weight: int
    """Number of samples in this share; may be 0."""
    epoch: int
    """Epoch that the batch belongs to, from 0."""
    position: int
    """Number of samples of the run that precede this global batch."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Requested further features by name: an array if the values stack, otherwise a list."""


def images_first(images: NDArray[Any]) -> torch.Tensor:
    """Return (n, height, width, channels) images as a (n, channels, height, width) tensor view."""
    return torch.from_numpy(images).permute(0, 3, 1, 2)


class DeviceCopier:
    """Copies tensors to `device` (default: CPU).

    To a GPU, the copy from pinned memory runs on a stream of its own while the model computes. The
    host tensor is held until the copy is done: batch memory that is released earlier would be
    refilled while the GPU still reads it.
    """

    def __init__(self, device: torch.device | str | None) -> None:
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        self._stream: Any = None
        self._held: list[tuple[Any, torch.Tensor]] = []

    @property
    def pins(self) -> bool:
        """Return whether batch memory should be pinned: only for a GPU."""
        return self.device.type == "cuda"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` on the device, or `tensor` itself if it is already there."""
        return self._copy_async(tensor) if self.pins else tensor.to(self.device)

    def _copy_async(self, tensor: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream(self.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = tensor.to(self.device, non_blocking=True)
            done = self._stream.record_event()
        current.wait_event(done)
        moved.record_stream(current)
        self._held = [(event, held) for event, held in self._held if not event.query()]
        self._held.append((done, tensor))
        return moved


def to_tensor(target: NDArray[Any]) -> torch.Tensor:
    """Return targets as a tensor in native byte order; class numbers become int64."""
    if target.ndim == 1 and target.dtype.kind in "iu":
        return torch.from_numpy(target.astype(np.int64, copy=False))
    return torch.from_numpy(target.astype(target.dtype.newbyteorder("="), copy=False))


def as_it_is(array: Any) -> torch.Tensor:
    """Return the source's array as a tensor in native byte order.

    A read-only array is copied, so that the tensor never shares the source's own memory.
    """
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native if native.flags.writeable else native.copy())
