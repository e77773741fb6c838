"""Horovod's own exceptions, the same classes for every front-end.

A failure between ranks is raised here as `HorovodInternalError` *from* the error of
`allstep.errors` that has the details (rank, peer, seconds): an elastic script catches the first, a
user reads both. Wrong arguments are ValueErrors and never one of these exceptions, because a retry
would not help.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from allstep.errors import CommError


class HorovodInternalError(RuntimeError):
    """A collective failed: a lost peer, different requests of the ranks, or an engine shutdown."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed. `skip_sync`: none was added, so no rank needs our state."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(f"the hosts of this job changed (skip_sync={skip_sync})")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A front-end was built for another version of its framework."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"made for {name} {version}, but {name} {installed_version} is installed: install"
            " matching versions"
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version


@contextmanager
def horovods_errors() -> Iterator[None]:
    """Raise failures between ranks within the block as Horovod's error."""
    try:
        yield
    except CommError as error:
        raise HorovodInternalError(str(error)) from error
