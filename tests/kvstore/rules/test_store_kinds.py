"""Names of stores: MXNet's names, any case, and errors that lead to the right one."""

import pytest

from allstep.errors import UserError
from allstep.kvstore.rules.store_kinds import StoreKind, store_kind

MODES = {
    "local": ["local", "device", "nccl", "local_update_cpu", "local_allreduce_device"],
    "sync": ["dist", "dist_sync", "dist_device_sync", "dist_sync_device", "horovod", "byteps"],
    "async": ["dist_async", "dist_async_device"],
}


@pytest.mark.parametrize(
    ("mode", "name"), [(m, name) for m, names in MODES.items() for name in names]
)
def test_names_of_mxnet(mode: str, name: str) -> None:
    assert store_kind(name).mode == store_kind(name.upper()).mode == mode
    assert store_kind(name.title()).name == name


def test_a_bound_on_ages_has_rounds() -> None:
    assert store_kind("Dist_Stale:12") == StoreKind("dist_stale:12", "stale", 12)


def test_stores_that_only_sum() -> None:
    assert [store_kind(name).has_optimizer for name in ("horovod", "byteps", "dist")] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dist_asinc", r"unknown store; did you mean 'dist_async'\?"),
        ("zzz", "known are: .*dist_stale:4.*local"),
        ("dist_stale:0", "no gradient would ever be old; use 'dist_sync'"),
        ("dist_stale", "expected 'dist_stale:S' with a whole number of rounds S of 1 or more"),
        ("dist_stale:00", "no gradient would ever be old"),
        ("dist_stale:-1", "expected 'dist_stale:S'"),
        ("dist_stale:2.5", "expected 'dist_stale:S'"),
        ("dist_async:4", "'dist_async' takes no number"),
        (3, "expected the name of a store"),
    ],
)
def test_an_unknown_name_leads_to_a_known_one(name: str, text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        store_kind(name)
    assert "\n" not in str(caught.value)
