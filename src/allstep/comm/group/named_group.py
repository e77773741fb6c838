"""A process group's name, description and store, as torch asks for them.

torch's C++ looks for some of these under names in camel case, its Python code under others; both
spellings are here. Without a name of its own a group is unusable for FSDP2, DTensor and
torch.compile.
"""

from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from allstep.comm.join.membership import current_generation
from allstep.errors import CommError, WorldError

NAME = "allstep"


class NamedGroup(ProcessGroup):
    """A torch process group with a name and a store, and without collectives."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        # The one constructor that works for a subclass.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self._name = self._desc = ""
        # Of an elastic run; None in a fixed world.
        self._generation = current_generation()

    def check_generation(self, name: str) -> None:
        """Raise WorldError if this process is in a later generation than this group.

        name: the operation. It is no CommError, since a further generation would not help.
        """
        if self._generation != current_generation():
            raise WorldError(f"{name} on a process group {self._end()}")

    def _end(self) -> str:
        """Return what a caller must know of a group that it kept from an old generation."""
        return (
            f"of generation {self._generation}, which has ended; this process is in generation"
            f" {current_generation()}: make the group again in each generation, and wrap a model in"
            " DistributedDataParallel again"
        )

    def __repr__(self) -> str:
        # torch replaces the error of an ended group by its own, with this text.
        is_old = self._generation != current_generation()
        return f"<allstep group {self._name!r}{' ' + self._end() if is_old else ''}>"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    name = _get_backend_name = getBackendName
    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def get_group_store(self) -> Store:
        return self._store

    def split_group(self, *_: Any, **__: Any) -> ProcessGroup:
        raise CommError(
            "split_group needs backend nccl: use torch.distributed.new_group", op="split_group"
        )

    def merge_remote_group(self, *_: Any, **__: Any) -> ProcessGroup:
        raise CommError(
            "merge_remote_group is not supported: form a new group of all the ranks",
            op="merge_remote_group",
        )
