"""The precision in which a model computes.

| precision | the model computes in | gradients |
|---|---|---|
| float32 | float32 | unchanged |
| bfloat16 | bfloat16 where that is safe (autocast); same range as float32 | unchanged |
| float16 | float16 where that is safe (autocast); a small range | scaled, see below |
| float64 | float64, weights included; for comparisons, not for speed | unchanged |

`precision: auto` is replaced by one of these before a `Precision` is created: see
`precision_choice`.

In float16 the loss is multiplied by a scale before `backward`, and the gradients are divided by it
afterwards. The scale halves when a gradient overflows, and that step is skipped; it doubles after
2,000 steps without an overflow. Checkpoints store it. Gradients are checked after the reduction, so
that all ranks skip the same steps.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_START, _STEPS_TO_DOUBLE = 2.0**16, 2000
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """The precision of a run's model; `scale` is the factor by which the loss is multiplied.

    `why` is the reason in one line, if `precision: auto` chose it.
    """

    def __init__(self, name: str, device: torch.device, why: str = "") -> None:
        self.name, self.device, self.why = name, device, why
        self.dtype = dtype_of_weights(name)
        self.scale = _START if name == "float16" else 1.0
        self.steps_since = 0

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which the model computes in this precision."""
        lower = _AUTOCAST.get(self.name)
        return nullcontext() if lower is None else torch.autocast(self.device.type, dtype=lower)

    def unscale(self, gradients: list[Tensor]) -> bool:
        """Divide reduced gradients by the scale.

        Return False if one of them overflowed, so that the step must be skipped.
        """
        if self.name != "float16" or not gradients:
            return True
        overflowed = torch.zeros((), device=self.device)
        torch._amp_foreach_non_finite_check_and_unscale_(
            gradients, overflowed, torch.full_like(overflowed, 1 / self.scale)
        )
        return self._note(bool(overflowed.item()))

    def _note(self, overflowed: bool) -> bool:
        self.steps_since = 0 if overflowed else self.steps_since + 1
        if overflowed:
            self.scale = max(1.0, self.scale / 2)
        elif self.steps_since == _STEPS_TO_DOUBLE:
            self.scale, self.steps_since = self.scale * 2, 0
        return not overflowed

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores.

        The reason is not included, so that equal states give equal files on any machine.
        """
        return {"name": self.name, "scale": self.scale, "steps_since": self.steps_since}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the scale of a checkpoint; `precision_choice.settle` has restored the name."""
        self.scale, self.steps_since = state["scale"], int(state["steps_since"])


def dtype_of_weights(name: str) -> torch.dtype:
    """Return the type of parameters and input for the precision `name`, which may be "auto"."""
    return torch.float64 if name == "float64" else torch.float32


def exact(logits: Tensor) -> Tensor:
    """Return `logits` in at least float32: losses and sums must not be rounded to 8 bits."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
