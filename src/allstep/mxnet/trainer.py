"""`DistributedTrainer`: Gluon's Trainer with the gradients of all ranks.

    trainer = hvd.DistributedTrainer(model.collect_params(), "sgd", {"learning_rate": 0.1})
    with mx.autograd.record():
        loss = loss_of(model(data), label)
    loss.backward()
    trainer.step(batch_size)      # the batch of this rank

All gradients of a step are reduced in one call, in MXNet's own memory; nothing is negotiated per
step. They are summed, as between the devices of a plain Trainer, and the update divides them by
`batch_size` times the number of ranks. So after `allreduce_grads()`, for example for clipping, they
are those of one process with all samples.

A gradient that this rank did not compute (`step(..., ignore_stale_grad=True)`) counts as zero. If
another rank computed it, all ranks update the parameter.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allstep.hvd.gradient_list import GradientList
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.mxnet.compression import Compression
from allstep.mxnet.framework import mx
from allstep.mxnet.mpi_ops import Sum
from allstep.mxnet.mxnet_errors import InvalidArgument, mxnets_errors
from allstep.mxnet.ndarray_views import NDArray, write_view
from allstep.mxnet.optimizer import DistributedOptimizer, check_options, mean_factor, reduces


# MXNet has no types, so its classes are Any for mypy.
class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """Gluon's Trainer whose `step` uses the gradients of all ranks.

    - `params`: the parameters, as for Gluon's Trainer, in the same order on all ranks.
    - `optimizer`, `optimizer_params`: as for Gluon's Trainer.
    - `compression`: the compressor for gradients while they are sent. Default: none.
    - `gradient_predivide_factor`: the part of the division by the number of ranks that happens
      before the sum, against overflow of float16. Default: 1.0.
    - `prefix`: put before the numbers of the parameters, in errors and in the timeline. Default:
      none.
    - `num_groups`: Horovod's number of groups of gradients. It is checked and kept; here all
      gradients are reduced together.
    - `process_set`: the ranks whose gradients are reduced. Default: all ranks. A rank outside
      updates with its own gradients.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check_options(gradient_predivide_factor, num_groups)
        if prefix is not None and not isinstance(prefix, str):
            raise InvalidArgument(f"prefix={prefix!r}: expected a string")
        with mxnets_errors():
            factor = mean_factor(process_set, gradient_predivide_factor)
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = _unwrapped(optimizer)
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        self._check_parameters()
        self._compression, self._process_set = compression, process_set
        self._gradient_predivide_factor = gradient_predivide_factor
        self._prefix, self._num_groups = prefix or "", num_groups
        # `step` and `update` divide this by the batch size.
        self._scale *= factor
        self._list: GradientList | None = None
        self._listed: list[Any] = []
        self._skips_stale = False

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Reduce the gradients and update the parameters.

        `batch_size`: the samples of this rank; if the ranks have different numbers of samples,
        their mean. `ignore_stale_grad`: allow parameters without a gradient since the last step;
        those that no rank has are not updated. Default: raise UserWarning for them.
        """
        self._skips_stale = ignore_stale_grad
        try:
            super().step(batch_size, ignore_stale_grad)
        finally:
            self._skips_stale = False

    def _check_parameters(self) -> None:
        if len(self._contexts or []) > 1:
            raise InvalidArgument(
                f"the parameters are on {len(self._contexts)} devices, {self._contexts}: a worker"
                " has one; start one worker for each device"
            )
        for param in self._params:
            if (param._stype, param._grad_stype) != ("default", "default"):
                raise InvalidArgument(
                    f"parameter {param.name!r} is {param._stype} with gradients of storage type"
                    f" {param._grad_stype}: DistributedTrainer reduces dense gradients; make the"
                    " layer without sparse_grad=True"
                )

    def _allreduce_grads(self) -> None:
        """Sum the gradients over the ranks; called by `step` and `allreduce_grads`."""
        with mxnets_errors():
            params = [param for param in self._params if param.grad_req != "null"]
            if params and reduces(self._process_set):
                self._reduce(params)

    def _reduce(self, params: Sequence[Any]) -> None:
        gradients = [param.list_grad()[0] for param in params]
        sent = [self._compression.compress(gradient) for gradient in gradients]
        views = [write_view(array) for array, _ in sent]
        given = [
            None if self._is_stale(param) else view
            for param, view in zip(params, views, strict=True)
        ]
        self._predivide(given)
        results = self._list_for(params, views).reduce(given)
        for param, view, result in zip(params, views, results, strict=True):
            _take(param, view, result)
        for gradient, (array, context) in zip(gradients, sent, strict=True):
            self._put_back(gradient, self._compression.decompress(array, context))

    def _is_stale(self, param: Any) -> bool:
        """Return whether backward has not computed this gradient since the last step."""
        return self._skips_stale and not param.list_data()[0]._fresh_grad

    def _predivide(self, given: Sequence[Tensor | None]) -> None:
        views = [view for view in given if view is not None]
        if self._gradient_predivide_factor != 1.0 and views:
            torch._foreach_mul_(views, 1.0 / self._gradient_predivide_factor)

    def _put_back(self, gradient: NDArray, restored: NDArray) -> None:
        if restored is not gradient:
            gradient[:] = restored

    def _list_for(self, params: Sequence[Any], views: Sequence[Tensor]) -> GradientList:
        """Return the list for these gradients; a new one if a script froze parameters."""
        numbers = [self._param2idx[param.name] for param in params]
        listed = [
            (f"{self._prefix}{number}", tuple(view.shape), view.dtype)
            for number, view in zip(numbers, views, strict=True)
        ]
        if self._list is None or listed != self._listed:
            if self._list is not None:
                self._list._detach_from_engine()
            named = [(name, view) for (name, *_), view in zip(listed, views, strict=True)]
            self._list = GradientList(named, op=Sum, process_set=self._process_set, in_place=True)
            self._listed = listed
        return self._list


def _take(param: Any, view: Tensor, result: Tensor | None) -> None:
    """Copy a gradient that only other ranks computed; the others were reduced in place."""
    if result is not None and result.data_ptr() != view.data_ptr():
        view.copy_(result)
        param.list_data()[0]._fresh_grad = True


def _unwrapped(optimizer: DistributedOptimizer) -> Any:
    """Return the wrapped optimizer, with its own scale."""
    warnings.warn(
        "DistributedTrainer reduces the gradients itself: the given DistributedOptimizer is"
        " unwrapped; give the plain optimizer",
        stacklevel=3,
    )
    plain = optimizer._optimizer
    plain.rescale_grad /= optimizer._factor
    return plain
