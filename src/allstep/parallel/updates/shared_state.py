"""The optimizer's state for weights that the ranks of a host share: each rank has the state of the
ranges that it owns, and all ranks can read all of it.

The wrapped optimizer creates its state itself, at its first step. The state is then moved into
shared memory, and moved there again after a step in which the optimizer replaced a tensor instead
of changing it. So a rank that saves (usually only rank 0 does) needs no other rank: between its own
steps no rank changes the state.

Where each element has one owner in the run, the memory has room for the state of all hosts.
`send_owned` brings the values of the others.

In an elastic run the memory also has an undo copy of the state (`undo`). The state of an update
counts once all ranks have finished it (`finish`); until then `whole` returns that from before it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from allstep.comm.join.launcher_store import collect
from allstep.comm.memory.segment import share
from allstep.errors import CommError, UserError
from allstep.limits import read_limits
from allstep.parallel.exchange.owner_ranges import ParameterRange
from allstep.parallel.exchange.owners import Owners
from allstep.parallel.updates.undo import Undo

_ALIGNED = 64
_NUMBERS = {"bool": bool, "int": int, "float": float}


class Entry(NamedTuple):
    """One value of an optimizer's state: its range of a parameter, its key, and its type.

    `kind`: "tensor", or the type of a plain number.
    """

    span: ParameterRange
    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size in shared memory, with padding."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return -(-max(1, torch.Size(self.shape).numel() * dtype.itemsize) // _ALIGNED) * _ALIGNED


def entries_of(
    ranges: Mapping[ParameterRange, Tensor], state: Mapping[Tensor, dict[str, Any]]
) -> Iterator[Entry]:
    """Return the state values of the optimizer's ranges."""
    for span, tensor in ranges.items():
        for key, value in state.get(tensor, {}).items():
            if isinstance(value, Tensor):
                yield Entry(
                    span,
                    key,
                    "tensor",
                    str(value.dtype).removeprefix("torch."),
                    tuple(value.shape),
                )
            elif type(value).__name__ in _NUMBERS:
                yield Entry(span, key, type(value).__name__, "float64", ())
            elif value is not None:
                raise UserError(
                    f"share_weights cannot share the optimizer's state {key!r} of type"
                    f" {type(value).__name__}: tensors and plain numbers only. Use"
                    " share_weights=False"
                )


def _entry(span: list[int], key: str, kind: str, dtype: str, shape: list[int]) -> Entry:
    return Entry(ParameterRange(*span), key, kind, dtype, tuple(shape))


class _Area(NamedTuple):
    """The state of all ranks of the host in shared memory.

    owners: the rank that updates each value, in the order of all owners that are known on this
    host. copies: the undo copy, empty without one.
    """

    owners: dict[Entry, int]
    views: dict[Entry, Tensor]
    copies: dict[Entry, Tensor]


class SharedState:
    """The state of all ranks of the host, once `gather` has been called.

    `undo`: the numbers of the updates that the ranks have begun, in an elastic run.
    """

    def __init__(self, owned: Owners, undo: Undo | None = None) -> None:
        self._owned, self._undo = owned, undo
        self._gathered = 0
        self._area = _Area({}, {}, {})
        # That of the last update that all ranks have finished.
        self._finished = self._area

    def _collect(self, own: str, check: Callable[[], None]) -> list[str]:
        """Return the text of each owner: those of the host, or those of the run."""
        owned, arena = self._owned, self._owned.local.arena
        rank, size = (
            (owned.group.rank(), owned.group.size())
            if owned.one_in_run
            else (arena.rank, arena.size)
        )
        host = "all" if owned.one_in_run else owned.local.layout.host
        place = f"state/{owned.key}/{host}/{self._gathered}"
        store = PrefixStore(place, owned.group.get_group_store())
        seconds = read_limits().start
        try:
            return collect(store, "entries", rank, size, own, seconds, check)
        # A lost rank.
        except CommError:
            raise
        except RuntimeError as error:
            raise CommError(
                f"share_weights: not all {size} ranks{'' if owned.one_in_run else ' of the host'}"
                f" had new optimizer state within {seconds:.0f} s: load_state_dict must be called"
                " on all of them, or be followed by broadcast_optimizer_state",
                rank=owned.group.rank(),
            ) from error

    def gather(
        self, ranges: Mapping[ParameterRange, Tensor], state: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Move our state into memory that all ranks of the host can read.

        All ranks of the host call it together, when there is new state.
        """
        owned, arena = self._owned, self._owned.local.arena
        self._gathered += 1
        place = f"state/{owned.key}/{owned.local.layout.host}/{self._gathered}"
        store, seconds = PrefixStore(place, owned.group.get_group_store()), read_limits().start
        check = owned.group.guard.check_for("share_weights")
        texts = self._collect(json.dumps(list(entries_of(ranges, state))), check)
        owners = {
            _entry(*each): rank for rank, text in enumerate(texts) for each in json.loads(text)
        }
        nbytes = sum(entry.nbytes for entry in owners) or 1
        copied = nbytes if self._undo is not None else 0
        segment = share(store, arena.rank, arena.size, nbytes + copied, seconds, check)
        views = self._views(owners, segment.view)
        copies = self._views(owners, segment.view[nbytes:]) if copied else {}
        self._area = _Area(owners, views, copies)
        self.put_back(ranges, state)
        owned.meet()

    def send_owned(self) -> None:
        """Receive the state that owners of other hosts have, and send them ours. A collective."""
        owned = self._owned
        by_host: list[list[Tensor]] = []
        for ranges in owned.ranges_by_host:
            mine = set(ranges)
            values = [view for entry, view in self._area.views.items() if entry.span in mine]
            by_host.append([memory_flat(view) for view in values])
        if by_host:
            owned.send_owned(by_host)

    def _views(self, entries: Iterable[Entry], memory: memoryview) -> dict[Entry, Tensor]:
        """Return a view of the memory for each value, one after the other."""
        start, views = 0, {}
        for entry in entries:
            dtype, count = getattr(torch, entry.dtype), torch.Size(entry.shape).numel()
            flat = torch.frombuffer(memory, dtype=dtype, count=max(1, count), offset=start)[:count]
            views[entry] = self._laid_out(flat, entry)
            start += entry.nbytes
        return views

    def keep(self) -> None:
        """Copy our state to the undo copy."""
        rank, (owners, views, copies) = self._owned.local.arena.rank, self._area
        mine = [entry for entry in copies if owners[entry] == rank]
        if mine:
            torch._foreach_copy_([copies[each] for each in mine], [views[each] for each in mine])

    def finish(self) -> None:
        """Record that all ranks have finished the update."""
        self._finished = self._area

    def _laid_out(self, flat: Tensor, entry: Entry) -> Tensor:
        """Return a view with the parameter's layout if the state has a value for each element.

        Then norms are summed in the same order, and loops are fast.
        """
        parameter = self._owned.named[entry.span.number].parameter
        same = entry.shape == tuple(parameter.shape)
        return (
            flat.as_strided(parameter.shape, parameter.stride()) if same else flat.view(entry.shape)
        )

    def put_back(
        self, ranges: Mapping[ParameterRange, Tensor], state: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Move values that the optimizer replaced in a step back into the shared memory."""
        for entry, view in self._area.views.items():
            values = state.get(ranges[entry.span], {}) if entry.span in ranges else {}
            value = values.get(entry.key)
            if entry.kind != "tensor" and value is not None:
                view.fill_(value)
            elif isinstance(value, Tensor) and value.data_ptr() != view.data_ptr():
                view.copy_(value)
                values[entry.key] = view

    def whole(self) -> dict[int, dict[str, Any]]:
        """Return the state of each parameter, assembled from all ranges, as private copies.

        With an undo copy it is the state after the last update that this rank has finished.
        """
        found: dict[int, dict[str, Any]] = {}
        owners, views, copies = self._finished
        self._assemble(found, views)
        if self._undo is not None:
            undone = {owner for owner in {*owners.values()} if self._undo.is_undone(owner)}
            self._assemble(
                found, {each: copy for each, copy in copies.items() if owners[each] in undone}
            )
        return found

    def _assemble(self, found: dict[int, dict[str, Any]], values: Mapping[Entry, Tensor]) -> None:
        """Put copies of these values into the state of whole parameters."""
        for entry, value in values.items():
            parameter = self._owned.named[entry.span.number].parameter
            state = found.setdefault(entry.span.number, {})
            if entry.kind != "tensor":
                state[entry.key] = _NUMBERS[entry.kind](value.item())
            elif not is_elementwise(entry.shape, entry.span, parameter):
                state[entry.key] = value.clone()
            else:
                if entry.key not in state:
                    state[entry.key] = torch.zeros_like(parameter, dtype=value.dtype)
                flat = state[entry.key].as_strided((parameter.numel(),), (1,))
                flat[entry.span.start : entry.span.end].copy_(memory_order(value, parameter))


def memory_flat(view: Tensor) -> Tensor:
    """Return a flat view of a value as it is in memory."""
    return view.as_strided((view.numel(),), (1,))


def is_elementwise(shape: tuple[int, ...], span: ParameterRange, parameter: Tensor) -> bool:
    """Return whether a state of this shape has a value for each element of the range."""
    return shape == (span.end - span.start,) or (shape == tuple(parameter.shape) and bool(shape))


def memory_order(value: Tensor, parameter: Tensor) -> Tensor:
    """Return an elementwise state as a flat tensor, in the memory order of the parameter."""
    if value.dim() == 1:
        return value
    laid = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return laid.as_strided((laid.numel(),), (1,))
