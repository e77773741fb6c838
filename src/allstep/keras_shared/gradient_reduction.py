"""The reduction of one Keras optimizer: what happens to its gradients outside of the framework.

A bridge (`allstep.keras.bridges`) passes all gradients of a step as torch tensors. Here they are
accumulated over `backward_passes_per_step`, reduced over the ranks, and the gradients of local
variables are scaled. State such as the number of passes is kept here, not in variables of the
optimizer, so a saved model is that of the plain optimizer.

The gradients of all steps go through one `GradientList`: nothing is negotiated, and the ranks match
their lists by the order in which they use them. In the graph of a Session several reductions may
run at the same time, in an order of its own on each rank, so there a step has a name and is a
grouped allreduce (as in `allstep.tensorflow.gradients`).

The original exception is kept here as well: TensorFlow and JAX replace it by one of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allstep.hvd import kept_errors
from allstep.hvd.gradient_list import GradientList
from allstep.hvd.handles import perform_group
from allstep.hvd.process_sets import ProcessSet
from allstep.hvd.requests import Average, gathering, group_names, reduction


@dataclass(frozen=True)
class Settings:
    """Horovod's options of a distributed optimizer; see `DistributedOptimizer`."""

    op: int
    compress: Callable[[Tensor], tuple[Tensor, Any]] | None
    decompress: Callable[[Tensor, Any], Tensor] | None
    process_set: ProcessSet
    sparse_as_dense: bool
    passes: int
    averages_passes: bool
    scales_local: bool


class Spec(NamedTuple):
    """A gradient as all ranks have it. `is_local`: it is not reduced."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_local: bool


class Sparse(NamedTuple):
    """A gradient of some rows of a variable: TensorFlow's IndexedSlices."""

    values: Tensor
    indices: Tensor


Array = Tensor | Sparse | None


class Reduction:
    """Reduces the gradients of one optimizer. `in_place`: whether they may be written to."""

    def __init__(self, settings: Settings, *, in_place: bool) -> None:
        self.settings = settings
        self.in_place = in_place
        self.counter = 0
        self._error: tuple[BaseException, BaseException | None] | None = None
        self._specs: tuple[Spec, ...] | None = None
        self._list: GradientList | None = None
        self._shared: list[int] = []
        self._sums: list[Tensor | None] = []

    def prepare(self, specs: tuple[Spec, ...]) -> None:
        """Set the gradients of all later steps; a no-op if they are the same as before."""
        if specs == self._specs:
            return
        self._specs = specs
        self._shared = [number for number, spec in enumerate(specs) if not spec.is_local]
        self._list = (
            GradientList(
                [
                    (specs[n].name, torch.zeros((), dtype=specs[n].dtype).expand(specs[n].shape))
                    for n in self._shared
                ],
                op=self.settings.op,
                process_set=self.settings.process_set,
                in_place=self.in_place,
                compress=self.settings.compress,
                decompress=self.settings.decompress,
            )
            if self._shared
            else None
        )
        self.counter, self._sums = 0, []

    # A step

    def step(self, arrays: Sequence[Array], name: str | None = None) -> tuple[bool, list[Array]]:
        """Return whether to update the variables now, and with which gradients.

        `arrays`: one for each spec; None where this rank has no gradient. `name`: by which the
        ranks match the step where several may run at the same time; all ranks then have the same
        gradients. Whatever is raised is kept for `take_error`.
        """
        try:
            return self._step(list(arrays), name)
        except BaseException as error:
            # Frameworks also remove the cause: they raise errors `from None`.
            self._error = error, error.__cause__
            if isinstance(error, Exception):
                kept_errors.keep(error, str(error))
            raise

    def raise_error(self) -> None:
        """Raise the exception of a failed step, if there is one, and keep it."""
        if self._error is not None:
            raise self._error[0] from self._error[1]

    def take_error(self) -> tuple[BaseException, BaseException | None] | None:
        """Return the exception of the last failed step and its cause, once."""
        error, self._error = self._error, None
        return error

    def _step(self, arrays: list[Array], name: str | None) -> tuple[bool, list[Array]]:
        passes = self.settings.passes
        if passes > 1:
            self.counter += 1
            if self.counter < passes:
                self._accumulate(arrays)
                return False, arrays
            arrays = self._accumulated(arrays)
            self.counter = 0
        self._scale_local(arrays)
        self._reduce_dense(arrays, name)
        self._reduce_sparse(arrays, name)
        return True, arrays

    def _accumulate(self, arrays: list[Array]) -> None:
        """Add the gradients of a pass to those of the passes before it."""
        if not self._sums:
            self._sums = [None] * len(arrays)
        for number, array in enumerate(self._all_dense(arrays)):
            total = self._sums[number]
            if array is None:
                continue
            if total is None:
                self._sums[number] = array.detach().clone()
            else:
                total.add_(array)

    def _accumulated(self, arrays: list[Array]) -> list[Array]:
        """Return the gradients of all passes, in the memory of the last ones where allowed."""
        last = self._all_dense(arrays)
        if not self.in_place:
            self._accumulate(arrays)
        results: list[Array] = []
        for array, total in zip(last, self._sums, strict=True):
            if self.in_place and array is not None:
                total = array if total is None else array.add_(total)
            if total is not None and self.settings.averages_passes:
                total.div_(self.settings.passes)
            results.append(total)
        # The results may still be used when the next pass begins.
        self._sums = []
        return results

    def _all_dense(self, arrays: Sequence[Array]) -> list[Tensor | None]:
        """Return the arrays; raise ValueError if one is sparse."""
        dense = [array for array in arrays if not isinstance(array, Sparse)]
        if len(dense) < len(arrays):
            assert self._specs is not None
            pairs = zip(self._specs, arrays, strict=True)
            found = [spec.name for spec, array in pairs if isinstance(array, Sparse)]
            raise ValueError(
                f"the gradients of {', '.join(found)} are IndexedSlices, which cannot be"
                f" accumulated over backward_passes_per_step={self.settings.passes}: give"
                " DistributedOptimizer sparse_as_dense=True"
            )
        return dense

    def _scale_local(self, arrays: list[Array]) -> None:
        """Divide the gradients of local variables by the number of ranks, as if reduced."""
        assert self._specs is not None
        size = self.settings.process_set.size() or 1
        if not self.settings.scales_local or size == 1 or not self.settings.process_set.included():
            return
        for number, spec in enumerate(self._specs):
            array = arrays[number]
            if not spec.is_local or array is None:
                continue
            if isinstance(array, Sparse):
                arrays[number] = Sparse(array.values / size, array.indices)
            else:
                arrays[number] = array.div_(size) if self.in_place else array / size

    def _reduce_dense(self, arrays: list[Array], name: str | None) -> None:
        if self._list is None:
            return
        given = [arrays[number] for number in self._shared]
        dense = [None if isinstance(array, Sparse) else array for array in given]
        results = self._list.reduce(dense) if name is None else self._by_name(dense, name)
        for number, result in zip(self._shared, results, strict=True):
            if not isinstance(arrays[number], Sparse):
                arrays[number] = result

    def _by_name(self, arrays: Sequence[Tensor | None], name: str) -> list[Tensor | None]:
        """Return the arrays, reduced as a grouped allreduce of the engine."""
        settings, present = self.settings, [array for array in arrays if array is not None]
        if not present or not self._reduces():
            return list(arrays)
        pack = settings.compress or (lambda array: (array, None))
        packed = [pack(each) for each in present]
        names = group_names("grouped_allreduce", name, present)
        how = settings.op, 1.0, 1.0, settings.process_set
        results = perform_group(
            [
                reduction(sent.contiguous(), None, one, *how)
                for (sent, _), one in zip(packed, names, strict=True)
            ]
        )
        unpack = settings.decompress or (lambda result, ctx: result)
        unpacked = iter([unpack(each, ctx) for each, (_, ctx) in zip(results, packed, strict=True)])
        return [None if array is None else next(unpacked) for array in arrays]

    def _reduces(self) -> bool:
        """Return whether this rank has others to reduce with."""
        process_set = self.settings.process_set
        return process_set.included() and (process_set.size() or 1) > 1

    def _reduce_sparse(self, arrays: list[Array], name: str | None) -> None:
        """Gather the rows of all ranks; their sum is the reduced gradient."""
        assert self._specs is not None
        process_set = self.settings.process_set
        size = process_set.size() or 1
        sparse = [
            (number, array)
            for number, array in enumerate(arrays)
            if isinstance(array, Sparse) and not self._specs[number].is_local
        ]
        if not sparse or not self._reduces():
            return
        # Not a number of this object: one rank alone may make optimizers that it does not use.
        assert self._list is not None
        key = name or self._list.key
        requests = [
            gathering(each.contiguous(), f"{key}.{number}.{part}", process_set)
            for number, array in sparse
            for part, each in zip(Sparse._fields, array, strict=True)
        ]
        results = perform_group(requests)
        factor = size if self.settings.op == Average else 1
        for position, (number, _) in enumerate(sparse):
            values, indices = results[2 * position : 2 * position + 2]
            arrays[number] = Sparse(values / factor, indices)
