"""NovoGrad: momentum over gradients normalized layer by layer (Ginsburg et al. 2019,
https://arxiv.org/abs/1905.11286, algorithm 1).

The second moment is one number per layer instead of one per weight, so the state is half of Adam's.
For weights w, gradient g, betas b1 and b2, decay d:

```
n = b2 * n + (1 - b2) * |g|^2                  n = |g|^2 at the layer's first nonzero gradient
m = b1 * m + (g / (sqrt(n) + eps) + d * w)     grad_averaging: the bracket times (1 - b1)
w = w - lr * m
```

Exempt layers are not decayed. They are normalized like all others: the learning rate is meant for
gradients of length one. `trust_ratios` returns 1 / (sqrt(n) + eps) of the others, and 1 if the
gradient is zero, since nothing is scaled then.

Errors of other implementations: starting n at 0 (the first steps are then 1 / sqrt(1 - b2), 7
times, too long), also after a first gradient that was zero; no `grad_averaging` with the learning
rate of an optimizer that has it: these differ by 1 / (1 - b1), 20 times.
"""

from typing import Any

import torch
from torch import Tensor

from allstep.optim.layerwise import Bundle, Group, LayerWise, add_scaled, exact, norms, sign, zeros


class NovoGrad(LayerWise):
    """SGD with momentum on gradients of about length one; see the module.

    `params`: parameters or parameter groups. `betas`: decay factors of the momentum and of the
    squared norm. `eps`: added to the norm. `grad_averaging`: scale the gradient by 1 - betas[0]
    (default: False). `maximize`: ascend instead of descend. `exempt`: whether layers are not
    decayed; None (default): those with fewer than two dimensions.
    """

    exact_state = ("exp_avg_sq",)

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        grad_averaging: bool = False,
        maximize: bool = False,
        exempt: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params,
            defaults | {"grad_averaging": grad_averaging, "maximize": maximize, "exempt": exempt},
        )

    def _new_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        square = torch.zeros((), dtype=exact(param.dtype), device=param.device)
        return {"exp_avg": zeros(param), "exp_avg_sq": square}

    def _update(self, bundle: Bundle, group: Group) -> None:
        beta1, _ = group["betas"]
        part = 1 - beta1 if group["grad_averaging"] else 1.0
        ratios = self._ratios_of(bundle, group)
        means = bundle.state("exp_avg")
        torch._foreach_mul_(means, beta1)
        add_scaled(means, bundle.grads, ratios, part * sign(group))
        if group["weight_decay"] and not bundle.exempt:
            torch._foreach_add_(means, bundle.params, alpha=part * group["weight_decay"])
        torch._foreach_add_(bundle.params, means, alpha=-group["lr"])

    def _ratios_of(self, bundle: Bundle, group: Group) -> Tensor:
        """Update n; return 1 / (sqrt(n) + eps) of each layer, and 1 for a gradient of zero.

        The latter also holds for eps=0.
        """
        kept = bundle.state("exp_avg_sq")
        before, squares = torch.stack(kept), norms(bundle.grads).square()
        now = torch.where(before > 0, before.lerp(squares, 1 - group["betas"][1]), squares)
        torch._foreach_copy_(kept, list(now.unbind()))
        ratios = torch.where((squares > 0) & (now > 0), 1 / (now.sqrt() + group["eps"]), 1.0)
        if not bundle.exempt:
            self._keep(bundle, ratios)
        return ratios
