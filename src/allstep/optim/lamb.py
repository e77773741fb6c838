"""LAMB: Adam with a trust ratio for each layer (You et al. 2019, https://arxiv.org/abs/1904.00962,
algorithm 2).

For weights w, gradient g, betas b1 and b2, decay d, at step t:

```
m = b1 * m + (1 - b1) * g                      v = b2 * v + (1 - b2) * g^2
r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
u = r + d * w                                  exempt layers: u = r
w = w - lr * |w| / |u| * u                     the ratio is 1 if |w| or |u| is 0, and for exempt
                                               layers
```

The paper's phi is the identity here: |w| is not clipped, as in the code of its experiments.

Errors of other implementations: no bias correction (the ratio hides that m and v are too small in
the first steps, but not for exempt layers); |w| clipped at 10, which slows large layers down; the
decay taken from the weights outside of the ratio, as in AdamW, instead of inside u; eps added to
|u| as well. With eps=0 a weight that never had a gradient is 0 / 0: here its r is 0, and the weight
does not change.

Computation: with s = sqrt(1 - b2^t) / (1 - b1^t) and q = m / (sqrt(v) + eps * sqrt(1 - b2^t)),
r = s * q. So the corrections are numbers instead of passes over the tensors: u / s = q + d / s * w.
"""

import math
from typing import Any

import torch
from torch import Tensor

from allstep.optim.layerwise import Bundle, Group, LayerWise, add_scaled, exact, norms, zeros


class LAMB(LayerWise):
    """Adam whose step is as long as the layer's weights, times the learning rate; see the module.

    `params`: parameters or parameter groups. `betas`: decay factors of the first and second moment.
    `eps`: added to the root of the second moment. `bias_correction`: False is version 3 of the
    paper. `maximize`: ascend instead of descend. `exempt`: whether layers are neither scaled nor
    decayed; None (default): those with fewer than two dimensions.
    """

    exact_state = ("exp_avg_sq",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        maximize: bool = False,
        exempt: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params,
            defaults | {"bias_correction": bias_correction, "maximize": maximize, "exempt": exempt},
        )

    def _new_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        return {"step": 0, "exp_avg": zeros(param), "exp_avg_sq": zeros(param, exact(param.dtype))}

    def _update(self, bundle: Bundle, group: Group) -> None:
        # The same for all of a bundle.
        step = bundle.states[0]["step"] + 1
        for state in bundle.states:
            state["step"] = step
        beta1, beta2 = group["betas"]
        root = math.sqrt(1 - beta2**step) if group["bias_correction"] else 1.0
        scale = root / (1 - beta1**step) if group["bias_correction"] else 1.0
        updates = self._direction(bundle, group, group["eps"] * root)
        if bundle.exempt:
            return torch._foreach_add_(bundle.params, updates, alpha=-group["lr"] * scale)
        if group["weight_decay"]:
            torch._foreach_add_(updates, bundle.params, alpha=group["weight_decay"] / scale)
        weights, lengths = norms(bundle.params), norms(updates) * scale
        ratios = torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)
        self._keep(bundle, ratios)
        return add_scaled(bundle.params, updates, ratios, -group["lr"] * scale)

    def _direction(self, bundle: Bundle, group: Group, eps: float) -> list[Tensor]:
        """Update the moments; return m / (sqrt(v) + eps), as tensors that the caller may change."""
        beta1, beta2 = group["betas"]
        means, squares = bundle.state("exp_avg"), bundle.state("exp_avg_sq")
        grads = torch._foreach_neg(bundle.grads) if group["maximize"] else bundle.grads
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        updates = torch._foreach_sqrt(squares)
        torch._foreach_add_(updates, eps)
        torch._foreach_reciprocal_(updates)
        # 1 / 0 is possible: no step instead of infinity. NaN of a gradient is kept.
        if eps < torch.finfo(updates[0].dtype).tiny:
            for update in updates:
                update.nan_to_num_(nan=math.nan, posinf=0.0)
        torch._foreach_mul_(updates, means)
        return list(updates)
