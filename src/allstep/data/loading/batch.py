"""What a loader gives out: one rank's share of a global batch, as tensors.

```
batch memory   (n, height, width, channels) uint8, contiguous       filled by the workers
Batch.data     (n, channels, height, width), the same memory        channels-last strides: nothing is copied
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
    target: torch.Tensor
    samples: Numbers
    """Numbers of the samples within their set."""
    weight: int
    """How many samples the share has; may be 0."""
    epoch: int
    position: int
    """Samples of the run before this global batch."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further features that the loader was asked for: an array where they stack, else a list."""


def images_first(images: NDArray[Any]) -> torch.Tensor:
    """(n, height, width, channels) as torch likes it, (n, channels, height, width), in the same
    memory."""
    return torch.from_numpy(images).permute(0, 3, 1, 2)


class Mover:
    """Takes tensors to a device. From pinned memory the copy runs beside the computation, and until
    it is done the memory is held: freed earlier, it would be filled anew under the copy's hands."""

    def __init__(self, device: torch.device | str | None) -> None:
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        self._stream: Any = None
        self._held: list[tuple[Any, torch.Tensor]] = []

    @property
    def pins(self) -> bool:
        """Whether batch memory should be pinned."""
        return self.device.type == "cuda"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` on the device; itself when it is there."""
        return self._beside(tensor) if self.pins else tensor.to(self.device)

    def _beside(self, tensor: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream(self.device)
        self._stream = self._stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = tensor.to(self.device, non_blocking=True)
            done = self._stream.record_event()
        current.wait_event(done)
        moved.record_stream(current)
        self._held = [(event, held) for event, held in self._held if not event.query()] + [
            (done, tensor)
        ]
        return moved


def to_tensor(target: NDArray[Any]) -> torch.Tensor:
    """Targets as torch takes them: class numbers become int64, in the machine's byte order."""
    if target.ndim == 1 and target.dtype.kind in "iu":
        return torch.from_numpy(target.astype(np.int64, copy=False))
    return torch.from_numpy(target.astype(target.dtype.newbyteorder("="), copy=False))
