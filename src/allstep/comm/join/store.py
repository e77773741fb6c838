"""The launcher's store in the shape that torch.distributed wants.

torch calls a Python store through C++ under two of its names in camel case; both spellings are
here. What torch sees of an error is the exception itself, so a key that does not come is torch's
own `DistStoreError`.
"""

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from allstep import wire


class WireStore(Store):
    """A `torch.distributed.Store` over a `wire.Client`.

    Keep a reference to it as long as torch uses it: what C++ holds alone has lost its Python half.
    """

    def __init__(self, client: wire.Client, timeout: timedelta) -> None:
        super().__init__()
        self._client = client
        self._timeout = timeout

    @property
    def client(self) -> wire.Client:
        """The client underneath."""
        return self._client

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait when they are not told."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return self._client.add(key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        self._client.append(key, _bytes(value))

    def check(self, keys: list[str]) -> bool:
        return self._client.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        try:
            self._client.wait(keys, (timeout or self._timeout).total_seconds())
        except TimeoutError as error:
            raise dist.DistStoreError(str(error)) from error

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._client.compare_set(key, _bytes(expected), _bytes(desired))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        try:
            return self._client.get_all(keys, self._timeout.total_seconds())
        except TimeoutError as error:
            raise dist.DistStoreError(str(error)) from error

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set are there."""
        return True

    def delete_key(self, key: str) -> bool:
        return self._client.delete(key)

    def num_keys(self) -> int:
        return self._client.count()

    deleteKey = delete_key  # noqa: N815 (the names that C++ looks for)
    getNumKeys = num_keys  # noqa: N815

    def clone(self) -> "WireStore":
        """The client keeps one connection per thread, so the clone may share it."""
        return WireStore(self._client, self._timeout)


def root_of(store: Store) -> Store:
    """The store itself, below all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def collect(
    store: Store, prefix: str, rank: int, size: int, value: str, seconds: float
) -> list[str]:
    """Leave our word under `prefix` and our rank; when every rank has, the words of all by rank.
    torch's error when one is late."""
    keys = [f"{prefix}/{other}" for other in range(size)]
    store.set(keys[rank], value)
    store.wait(keys, timedelta(seconds=seconds))
    return [store.get(key).decode() for key in keys]


def _bytes(value: str | bytes | bytearray) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
