"""A unit of the model: a slice with its lock and version, and a mark for the party that tore it."""

from allstep.kvstore.memory.key_memory import Slice
from allstep.kvstore.memory.slice_locks import Lock
from allstep.kvstore.rules.slices import Span
from allstep.kvstore.training.party_lines import TORN, PartyLines


class Unit(Slice):
    """Unit `index`. span: its elements. numbers: its part of the line. lines: of the parties."""

    __slots__ = ("_lines",)

    def __init__(
        self, index: int, span: Span, lock: Lock, numbers: memoryview, lines: PartyLines
    ) -> None:
        super().__init__("weights", index, span, lock, numbers)
        self._lines = lines

    def _repair(self, holder: int) -> None:
        # Before the version is even: else the torn push would count as complete.
        self._lines.put(holder, TORN, 1)
        super()._repair(holder)

    def _text(self, call: str) -> str:
        return call
