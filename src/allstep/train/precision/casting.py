"""A model in another precision, with all that it is made of.

`model.to(torch.float32)` makes complex numbers real: their imaginary parts are gone, which a line on
the terminal says and nobody reads. A filter in the frequency domain is a model with such parameters.
So each tensor goes to its own kind of the precision:

```
precision    real tensors   complex tensors   whole numbers
float32      float32        complex64         as they are
float64      float64        complex128        as they are
```
"""

import torch
from torch import Tensor, nn

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def cast(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The same model on `device`, its parameters and buffers in the precision of `dtype`, float32 or
    float64."""

    def moved(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(device, _COMPLEX[dtype])
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return model._apply(moved)  # type: ignore[no-untyped-call, no-any-return]  # torch: what its own `to` is made of
