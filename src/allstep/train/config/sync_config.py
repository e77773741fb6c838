"""The section `sync` of a config: when the parties of a run exchange what they have learned.

`sync=stale:2` on the command line is `sync.name=stale:2`.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from allstep.compression.codec_name import NONE, codec_name
from allstep.errors import ConfigError
from allstep.parallel.sync_mode import SyncMode, sync_mode
from allstep.train.config.number_types import Decay, Positive
from allstep.train.config.section import Section

AVAILABLE = ("allreduce", "server", "async", "stale", "clock", "lazy", "local", "diloco", "elastic")
"""Modes that `allstep train` can run."""


def _known(text: str) -> str:
    try:
        mode = sync_mode(text)
        if mode.name not in AVAILABLE:
            raise ConfigError(f"sync={text}: not available yet; available: {', '.join(AVAILABLE)}")
        return str(mode)
    except ConfigError as error:
        reason = str(error).partition(": ")[2]
        expected = f"a mode such as async or stale:2 ({reason})"
        raise PydanticCustomError("sync", "{expected}", {"expected": expected}) from error


def _codec(text: str) -> str:
    try:
        found = codec_name(text)
    except ConfigError as error:
        reason = str(error).partition(": ")[2]
        expected = f"a codec such as bf16 or 2bit ({reason})"
        raise PydanticCustomError("compress", "{expected}", {"expected": expected}) from error
    return NONE if found is None else found.text


class SyncConfig(Section):
    """When parties exchange what they have learned, and how."""

    name: Annotated[str, AfterValidator(_known)] = "allreduce"
    """Mode: allreduce, server, async, stale:S, clock:S, lazy:K, local:H, local:H:E, diloco:H or
    elastic:H."""
    parties: Literal["auto", "workers", "hosts"] = "auto"
    """Parties: each worker, or the workers of a host together, which reduce their gradients at
    every step; auto: hosts if there are several."""
    correct: Literal["none", "lr", "delay"] = "none"
    """Correction for stale gradients: divide the learning rate by the staleness, or estimate the
    gradient at the present weights (DC-ASGD)."""
    compress: Annotated[str, AfterValidator(_codec)] = "none"
    """How gradients are compressed between hosts with sync=allreduce: bf16, fp16, int8, 2bit,
    2bit:t, 1bit, topk:P% or powersgd:r."""
    scale: bool = True
    """Whether the learning rate of a push is multiplied by its samples / batch."""
    outer_lr: Positive | None = None
    """Learning rate of DiLoCo's outer step; None chooses it by the optimizer and H."""
    outer_momentum: Decay | None = None
    """Nesterov momentum of DiLoCo's outer step; None chooses it by the optimizer and H."""
    alpha: Annotated[float, Field(gt=0, le=1)] | None = None
    """Part of its distance by which a worker, and the center, move in `elastic:H`; None: 0.9
    divided by the number of workers."""

    def are_hosts(self, num_hosts: int) -> bool:
        """Return whether the parties of a run on so many hosts are hosts, and not workers."""
        return self.parties == "hosts" or (self.parties == "auto" and num_hosts > 1)

    @property
    def mode(self) -> SyncMode:
        """The mode that `name` names."""
        return sync_mode(self.name)

    @property
    def compresses(self) -> bool:
        """Whether gradients between hosts are compressed."""
        return self.compress != NONE
