"""How servers and workers find each other, in the store that all ranks share.

```
allstep/servers/<server>/up      server   JSON: its host and pid, when it accepts stores
allstep/servers/<server>/count   workers  how many stores were announced to it
allstep/servers/<server>/<n>     worker   the n-th store, as JSON: `Announced`
allstep/servers/stores/<nonce>/  both     the links of one store: its prefix
```

`<server>` is a number for servers of `allstep run --servers`, else a name that its worker chose.
A server accepts the stores that are announced to it one after the other, and connects to all their
workers in order of rank.
"""

import json
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import PrefixStore, Store

_ROOT = "allstep/servers"
COUNT = "ALLSTEP_SERVERS"
"""Environment variable of workers: the number of servers that `allstep run` has started."""
SERVER = "ALLSTEP_SERVER"
"""Environment variable of such a server: its name."""


@dataclass(frozen=True)
class Announced:
    """One store, as a server must know it.

    nonce: of its links. server: the number of this server in the store. mode, rounds: as in
    `rules.store_kinds`. hosts: the host of each worker, counted from 0.
    """

    nonce: str
    server: int
    mode: str
    rounds: int
    hosts: tuple[int, ...]

    @property
    def num_parties(self) -> int:
        """The number of workers."""
        return len(self.hosts)

    def link(self, store: Store, party: int) -> Store:
        """Return the part of the store for the link of a worker."""
        return PrefixStore(f"{_ROOT}/stores/{self.nonce}/{self.server}/{party}", store)


def up_key(server: str) -> str:
    """Return the key that a server writes when it is ready."""
    return f"{_ROOT}/{server}/up"


def store_key(server: str, number: int) -> str:
    """Return the key of a store that is announced to a server, from 1."""
    return f"{_ROOT}/{server}/{number}"


def announce(store: Store, server: str, announced: Announced) -> None:
    """Announce a store to a server; one worker does that for all."""
    number = store.add(f"{_ROOT}/{server}/count", 1)
    store.set(store_key(server, number), json.dumps(asdict(announced)))


def read_announced(text: str | bytes) -> Announced:
    """Return what `announce` wrote."""
    found = json.loads(text)
    return Announced(**{**found, "hosts": tuple(found["hosts"])})
