"""When parties exchange what they have learned: the modes between synchronous and asynchronous.

A *party* is what pushes: a worker, or all workers of a host together.

=============  ======================================  ==========================================
`sync`         known as                                which party waits
=============  ======================================  ==========================================
allreduce      synchronous, no server                  all, at every step
server         synchronous parameter server            all, at every step
async          asynchronous parameter server           none
stale:S        bounded staleness                       one whose update would make another party's
                                                       gradient older than S rounds
clock:S        stale synchronous parallel (SSP)        one more than S steps ahead of the slowest
lazy:K         Downpour SGD                            none; each pushes the sum of K steps
local:H        local SGD                               all, every H steps, to average weights
local:H:E      post-local SGD                          as allreduce up to epoch E, then as local:H
diloco:H       DiLoCo                                  all, every H steps, then an outer step
elastic:H      EASGD                                   none; every H steps a party and the center
                                                       move toward each other
=============  ======================================  ==========================================

`sync_mode` reads such a text. This module is pure: it imports neither torch nor the implementations
of the modes.
"""

from dataclasses import dataclass

from allstep.errors import ConfigError, did_you_mean

VARIABLE = "ALLSTEP_SYNC"
"""The mode of scripts that do not name one."""
_LARGEST = 1_000_000
# By name: what its number is, with an example; "" for modes without a number.
_NUMBERS = {
    "allreduce": "",
    "server": "",
    "async": "",
    "stale": "S, the largest age of a gradient in rounds, such as stale:2",
    "clock": "S, the largest difference in steps, such as clock:4",
    "lazy": "K, the steps of a push, such as lazy:4",
    "local": "H, the steps between two averages, such as local:8",
    "diloco": "H, the steps between two outer steps, such as diloco:32",
    "elastic": "H, the steps between two moves toward the center, such as elastic:8",
}
NAMES = tuple(_NUMBERS)
# Each party takes its share of every global batch, so all parties make the same number of steps.
_EQUAL_STEPS = ("allreduce", "server", "local", "diloco")
# Parties that act on the weights instead of the gradients.
_AVERAGES = ("local", "diloco", "elastic")


@dataclass(frozen=True)
class SyncMode:
    """A mode and its number.

    name: one of `NAMES`. number: the S, H or K after the colon; 0 without one. from_epoch: the E of
    `local:H:E`, else 0.
    """

    name: str = "allreduce"
    number: int = 0
    from_epoch: int = 0

    @property
    def has_equal_steps(self) -> bool:
        """Whether all parties make the same number of steps, each with a share of every batch."""
        return self.name in _EQUAL_STEPS

    @property
    def averages_weights(self) -> bool:
        """Whether parties update weights of their own, which are averaged at intervals."""
        return self.name in _AVERAGES

    @property
    def uses_store(self) -> bool:
        """Whether the weights are in a key-value store to which parties push."""
        return self.name not in ("allreduce", "local", "diloco")

    @property
    def survives_lost_party(self) -> bool:
        """Whether the other parties continue without a party that is lost."""
        return self.name not in ("allreduce", "server")

    def __str__(self) -> str:
        numbers = [each for each in (self.number, self.from_epoch) if each]
        return ":".join([self.name, *map(str, numbers)])


def sync_mode(text: str, key: str = "sync") -> SyncMode:
    """Return the mode that a text such as "stale:2" names; ConfigError if it names none.

    key: the name of the setting, for the error.
    """
    name, *numbers = text.strip().lower().split(":")
    if name not in _NUMBERS:
        raise ConfigError(f"{key}={text}: unknown mode; {did_you_mean(name, NAMES)}")
    meaning, most = _NUMBERS[name], 2 if name == "local" else 1
    if not meaning:
        if numbers:
            raise ConfigError(f"{key}={text}: {name} takes no number; write {key}={name}")
        return SyncMode(name)
    if not 1 <= len(numbers) <= most:
        raise ConfigError(f"{key}={text}: expected {name}:{meaning}")
    values = [_number(text, name, each, key) for each in numbers]
    return SyncMode(name, *values)


def _number(text: str, name: str, found: str, key: str) -> int:
    is_number = found.isascii() and found.isdigit() and len(found) <= len(str(_LARGEST))
    if is_number and int(found) == 0 and name in ("stale", "clock"):
        raise ConfigError(
            f"{key}={text}: with 0 all parties wait for each other at every step; use {key}=server"
        )
    if not (is_number and 1 <= int(found) <= _LARGEST):
        raise ConfigError(
            f"{key}={text}: {found!r} is no whole number from 1 to {_LARGEST}; expected"
            f" {name}:{_NUMBERS[name]}"
        )
    return int(found)
