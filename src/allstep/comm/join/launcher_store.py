"""The launcher's store as a `torch.distributed.Store`.

torch calls a Python store from C++ under two names in camel case; both spellings are here. torch
passes the exception itself on, so a key that does not arrive raises torch's own `DistStoreError`.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from allstep import wire
from allstep.errors import PeerLost

# Seconds between two checks of a wait that may be ended.
_CHECK_SECONDS = 0.5


class WireStore(Store):
    """A `torch.distributed.Store` over a `wire.Client`.

    Keep a reference to it as long as torch uses it: C++ alone does not keep its Python half alive.

    `unless`: a key whose appearance ends every wait with PeerLost and its value as the reason: the
    end of the generation, in an elastic run. `ended`: that reason, once it is known.
    """

    def __init__(self, client: wire.Client, timeout: timedelta, unless: str | None = None) -> None:
        super().__init__()
        self._client = client
        self._timeout = timeout
        self.unless = unless
        self.ended: str | None = None

    @property
    def client(self) -> wire.Client:
        """The client underneath."""
        return self._client

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait without an explicit timeout."""
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
        with _torchs_errors():
            self._client.wait(keys, (timeout or self._timeout).total_seconds(), self.unless)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._client.compare_set(key, _bytes(expected), _bytes(desired))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with _torchs_errors():
            return self._client.get_all(keys, self._timeout.total_seconds(), self.unless)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are supported."""
        return True

    def delete_key(self, key: str) -> bool:
        return self._client.delete(key)

    def num_keys(self) -> int:
        return self._client.count()

    # The names that C++ looks for.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def clone(self) -> "WireStore":
        """Return a store with the same client, which keeps one connection per thread."""
        return WireStore(self._client, self._timeout, self.unless)


@contextlib.contextmanager
def _torchs_errors() -> Iterator[None]:
    """Raise torch's error for keys that are late, and PeerLost for a generation that has ended."""
    try:
        yield
    except TimeoutError as error:
        raise dist.DistStoreError(str(error)) from error
    except wire.WaitEnded as ended:
        raise PeerLost(ended.value.decode()) from None


def root_of(store: Store) -> Store:
    """Return the store below all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def is_elastic(store: Store) -> bool:
    """Return whether the world of this store may end and be followed by another one."""
    root = root_of(store)
    return isinstance(root, WireStore) and root.unless is not None


def reason_of_end(store: Store) -> str | None:
    """Return why the world of this store has ended; None as long as it is not known to have."""
    root = root_of(store)
    return root.ended if isinstance(root, WireStore) else None


def collect(
    store: Store,
    prefix: str,
    rank: int,
    size: int,
    value: str,
    seconds: float,
    check: Callable[[], None] | None = None,
) -> list[str]:
    """Write our value under `prefix` and our rank; return the values of all ranks, by rank.

    Raises torch's error if a rank has not written within `seconds`. `check`: see `wait_for`.
    """
    keys = [f"{prefix}/{other}" for other in range(size)]
    store.set(keys[rank], value)
    wait_for(store, keys, seconds, check)
    # One request for all of them, where the store supports it. torch's stubs lack this method.
    has_requests_for_many = store.has_extended_api()  # type: ignore[attr-defined]
    values = store.multi_get(keys) if has_requests_for_many else map(store.get, keys)
    return [value.decode() for value in values]


def wait_for(
    store: Store, keys: Sequence[str], seconds: float, check: Callable[[], None] | None = None
) -> None:
    """Wait until the store has all keys; raise torch's error after `seconds`.

    `check`: called twice a second; what it raises ends the wait. A group's guard has one that
    raises when a rank is lost, which will never write its key.
    """
    end = time.monotonic() + seconds
    while check is not None and (left := end - time.monotonic()) > _CHECK_SECONDS:
        check()
        try:
            return store.wait(list(keys), timedelta(seconds=min(left, _CHECK_SECONDS)))
        except dist.DistStoreError:
            continue
    return store.wait(list(keys), timedelta(seconds=max(0.0, end - time.monotonic())))


def _bytes(value: str | bytes | bytearray) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
