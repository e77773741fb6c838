"""Horovod's own exceptions, the same classes for every front-end.

What goes wrong between ranks is raised here as `HorovodInternalError` *from* the error of
`allstep.errors` that says more (rank, peer, seconds): an elastic script catches the first, a person
reads both. Wrong arguments are ValueErrors and never one of these, because trying again would not
mend them.
"""


class HorovodInternalError(RuntimeError):
    """A collective failed: a peer is gone, ranks asked for different things, or the engine was shut
    down."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or went. `skip_sync`: none was added, so there is nobody who needs our state."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(f"the hosts of this job changed (skip_sync={skip_sync})")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A front-end was built for another version of its framework."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"made for {name} {version}, but {name} {installed_version} is installed: install one"
            " that fits the other"
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version
