"""The error for one lost server of a store that continues without it."""

from allstep.errors import PeerLost


class ServerLost(PeerLost):
    """A server is lost; the links to the others can be used. server: its number."""

    def __init__(self, text: str, *, rank: int, server: int) -> None:
        super().__init__(text, rank=rank)
        self.server = server
