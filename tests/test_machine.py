"""Cores, memory and interfaces, against the values of the system."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep import machine


def test_caches_as_the_kernel_reports_them(tmp_path: Path) -> None:
    found = [
        ("1", "Data", "32K"),
        ("1", "Instruction", "64K"),
        ("2", "Unified", "1024K"),
        ("3", "Unified", "32M"),
        ("", "", ""),
    ]
    for number, texts in enumerate(found):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, text in zip(("level", "type", "size"), texts, strict=True):
            (folder / name).write_text(f"{text}\n")
    assert machine.cache_sizes(tmp_path) == {1: 32 << 10, 2: 1 << 20, 3: 32 << 20}
    assert machine.largest_cache(tmp_path) == 32 << 20
    assert (
        machine.cache_sizes(tmp_path / "none") == {}
        and machine.largest_cache(tmp_path / "none") == 64 << 20
    )


@pytest.mark.usefixtures("processes")
def test_the_affinity_mask_counts() -> None:
    code = "from allstep.machine import allowed_cores; print(allowed_cores())"
    first = str(min(os.sched_getaffinity(0)))
    found = subprocess.run(
        ["taskset", "-c", first, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.stdout == "1\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_the_cgroups_quota_counts(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert machine.cpu_quota(tmp_path) == quota


def test_a_quota_below_one_core_is_still_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda: 0.5)
    assert machine.allowed_cores() == 1


MASKS = st.lists(st.sets(st.integers(0, 15), min_size=1), min_size=1, max_size=6)


@given(MASKS)
def test_shares_never_exceed_the_cores(masks: list[set[int]]) -> None:
    shares = [machine.fair_share(mask, masks) for mask in masks]
    cores = len(set().union(*masks))
    assert all(1 <= share <= len(mask) for share, mask in zip(shares, masks, strict=True))
    assert sum(shares) <= max(cores, len(masks)) + sum(share == 1 for share in shares)


def test_shares_of_usual_bindings() -> None:
    everything = set(range(8))
    assert machine.fair_share(everything, [everything] * 2) == 4
    assert machine.fair_share({0, 1, 2, 3}, [{0, 1, 2, 3}, {4, 5, 6, 7}]) == 4
    assert machine.fair_share({0}, [{0}, {1}]) == 1
    assert machine.fair_share(everything, [everything] * 16) == 1
    assert machine.fair_share(everything, [everything] * 2, quota=2.0) == 1


def test_memory_against_psutil() -> None:
    assert abs(machine.memory().available - psutil.virtual_memory().available) < 1 << 30


def test_interfaces_against_psutil() -> None:
    theirs = {
        name: sorted(entry.address for entry in entries if entry.family.name == "AF_INET")[:1]
        for name, entries in psutil.net_if_addrs().items()
    }
    ours = {
        name: [address for address in found if ":" not in address]
        for name, found in machine.interfaces().items()
    }
    assert {name: found for name, found in ours.items() if found} == {
        name: found for name, found in theirs.items() if found
    }
    assert machine.interface_of("127.0.0.1") == "lo"
    assert machine.interface_of("203.0.113.7") is None


def test_routes() -> None:
    assert machine.route_to("127.0.0.1") == "127.0.0.1"
    assert "127.0.0.1" not in machine.outside_addresses()


def faults_of_steps(keep: bool) -> int:
    """Pages that the system has to give out while 64 MB are taken and given back ten times, once
    the heap has found its form.

    Something small that is taken meanwhile may settle at the end of the freed block, which then is
    a little short for the next 64 MB: that costs fresh pages once or a few times (seen: 3 of the
    first 10), never for ever. So the least of five rounds counts.
    """
    import resource

    import torch

    from allstep.machine import keep_freed_memory

    if keep:
        assert keep_freed_memory()

    def faults_of_ten() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            torch.ones(16_000_000)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return min(faults_of_ten() for _ in range(5 if keep else 1))


def test_freed_memory_is_kept(ranks: Any) -> None:
    """64 MB are 16,384 pages of 4 KB, or 32 of 2 MB."""
    (given_back,), (kept,) = ranks(1, faults_of_steps, False), ranks(1, faults_of_steps, True)
    assert kept < max(20, given_back / 10)


X86 = (
    "processor\t: 0\nmodel name\t: x\nflags\t\t: {}\n\nprocessor\t: 1\nflags\t\t: {}\nbugs\t\t:"
    " spectre_v1\n"
)
ARM = "processor\t: 0\nFeatures\t: {}\n\nprocessor\t: 1\nFeatures\t: {}\n"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (X86.format("fpu avx2", "fpu avx2"), {"fpu", "avx2"}),
        (ARM.format("fp asimd bf16 i8mm", "fp asimd"), {"fp", "asimd"}),
        ("processor\t: 0\nhart\t: 0\nisa\t: rv64imafdc\n", None),
        (None, None),
    ],
    ids=["x86", "arm, cores that differ", "risc-v", "no file"],
)
def test_flags_are_those_of_all_cores(
    tmp_path: Path, text: str | None, flags: set[str] | None
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert machine.cpu_flags(tmp_path / "cpuinfo") == flags


@pytest.mark.parametrize(
    ("flags", "environ", "native", "why"),
    [
        ("avx512f avx512_bf16", {}, True, "avx512_bf16"),
        ("avx512f avx512_bf16 amx_tile amx_bf16", {}, True, "amx_bf16"),
        ("asimd bf16", {}, True, "bf16"),
        ("sve svebf16", {}, True, "svebf16"),
        (
            "avx512_bf16",
            {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "ATEN_CPU_CAPABILITY": "avx512"},
            True,
            "avx512_bf16",
        ),
        ("avx2 fma", {}, False, "no bfloat16 arithmetic"),
        ("avx512f avx512bw avx512_vnni avx_ne_convert", {}, False, "no bfloat16 arithmetic"),
        ("avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False, "ONEDNN_MAX_CPU_ISA=AVX2"),
        ("avx512_bf16", {"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, False, "DNNL_MAX_CPU_ISA=AVX512_CORE"),
        ("avx512_bf16", {"ATEN_CPU_CAPABILITY": "avx2"}, False, "ATEN_CPU_CAPABILITY=avx2"),
        (None, {}, None, "no CPU flags"),
    ],
)
def test_bfloat16_by_flags(
    flags: str | None, environ: dict[str, str], native: bool | None, why: str
) -> None:
    found = machine.cpu_bfloat16(None if flags is None else frozenset(flags.split()), environ)
    assert found.native is native
    assert why in found.why and "\n" not in found.why
