"""A process group's name, description and store, as torch asks for them.

torch's C++ looks for some of these under names in camel case, its Python code under others; both
spellings are here. Without a name of its own a group is unusable for FSDP2, DTensor and
torch.compile.
"""

from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from allstep.errors import CommError

NAME = "allstep"


class NamedGroup(ProcessGroup):
    """A torch process group with a name and a store, and without collectives."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        # The one constructor that works for a subclass.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self._name = self._desc = ""

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
