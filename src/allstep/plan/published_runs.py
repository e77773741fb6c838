"""Published measurements of training on many workers, as data with their sources.

`levels` predicts each of them from what is known at a level; `published_table` prints the errors.
Where a source states efficiencies only, a point is efficiency x workers x the speed of one worker.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from allstep.costs.speed import Speed
from allstep.plan.models import Layer, layers_of
from allstep.plan.setting import (
    DDP,
    HOROVOD_2017,
    Buckets,
    Policy,
    Profile,
    Servers,
    profile_from_speed,
)
from allstep.plan.simulator import FLAT_RING
from allstep.plan.transports import INSIDE, TRANSPORTS, Transport, read_link


@dataclass(frozen=True)
class PublishedRun:
    """A series of runs on a growing number of hosts, and what is known about it."""

    name: str
    layers: tuple[Layer, ...]
    batch_per_worker: int
    alone: float
    """Samples/s of one worker."""
    workers_per_host: int
    link: Speed
    """Nominal."""
    points: Mapping[int, float]
    """Samples/s by number of hosts."""
    policy: Policy = field(default_factory=Policy)
    source: str = ""
    host: float | None = None
    """Samples/s of one full host; enables level 2."""
    transport: Transport | None = None
    """Enables level 1."""
    inside: Speed = INSIDE["pcie"]
    element: int = 4
    """Bytes of an element of a gradient."""
    servers: Mapping[int, int] = field(default_factory=dict)
    """Number of parameter servers by number of hosts; else one per host."""
    extrapolates: bool = False
    """Whether points beyond the smallest one are predicted from it (level 3)."""

    @cached_property
    def profile(self) -> Profile:
        """The profile of one worker."""
        return profile_from_speed(self.layers, self.batch_per_worker, self.alone, self.element)


_README = "Horovod's README"
_TABLE_2017 = "TensorFlow's benchmark page, May 2017"
_SECOND = "e-bug/distributed-tensorflow-benchmarks, report/source/benchmarks.tex"
_DLPERF = "Oneflow-Inc/DLPerf, tables of ResNet-50"
_ONCE_A_RING = Policy(FLAT_RING, HOROVOD_2017)
_DDP_RING = Policy(FLAT_RING, DDP)
_PER_WORKER = Policy(servers=Servers())
_PER_HOST = Policy(servers=Servers(sum_in_host=True))


def _horovod() -> Iterator[PublishedRun]:
    """Yield Horovod on hosts of 4 Pascal GPUs; batch 64."""
    alone = {"inception_v3": 134.4, "resnet101": 119.4, "vgg16": 130.9}
    rdma = {
        "inception_v3": (2022.6, 0.90, 0.90),
        "resnet101": (1746.2, 0.90, 0.90),
        "vgg16": (1787.4, 0.79, 0.68),
    }
    for model, (first, on_32, on_128) in rdma.items():
        one = alone[model]
        points = {4: first, 32: on_32 * 128 * one, 128: on_128 * 512 * one}
        yield _pascal(f"Horovod, RDMA 25 Gbit/s: {model}", model, one, "25Gbit", "rdma", points)
    over_tcp = {
        "inception_v3": (1990.7, 0.88),
        "resnet101": (1685.1, 0.88),
        "vgg16": (1308.7, 0.61),
    }
    for model, (first, on_32) in over_tcp.items():
        points = {4: first, 32: on_32 * 128 * alone[model]}
        name = f"Horovod, TCP 25 Gbit/s: {model}"
        yield _pascal(name, model, alone[model], "25Gbit", "nccl-2.0", points)
    at_40 = {
        "inception_v3": (148.8, 7932.0),
        "resnet101": (136.0, 7742.0),
        "vgg16": (149.6, 6084.0),
    }
    for model, (one, found) in at_40.items():
        name = f"Horovod, TCP 40 Gbit/s: {model}"
        yield _pascal(name, model, one, "40Gbit", "nccl-2.0", {16: found})


def _pascal(
    name: str,
    model: str,
    alone: float,
    link: str,
    transport: str,
    points: Mapping[int, float],
    policy: Policy = _ONCE_A_RING,
) -> PublishedRun:
    return PublishedRun(
        name=name,
        layers=layers_of(model),
        batch_per_worker=64,
        alone=alone,
        workers_per_host=4,
        link=read_link(link),
        points=points,
        policy=policy,
        source=_README,
        transport=TRANSPORTS[transport],
        inside=INSIDE["pcie"],
        extrapolates=len(points) > 1,
    )


def _tensorflow_servers() -> Iterator[PublishedRun]:
    """Yield TensorFlow with servers on the hosts of `_horovod`."""
    rows = {
        ("25Gbit", 4): (
            ("inception_v3", 134.4, 1346.0),
            ("resnet101", 119.4, 960.0),
            ("vgg16", 130.9, 74.7),
        ),
        ("40Gbit", 16): (
            ("inception_v3", 148.8, 4225.0),
            ("resnet101", 136.0, 2996.0),
            ("vgg16", 149.6, 97.0),
        ),
    }
    for (link, hosts), models in rows.items():
        for model, alone, found in models:
            name = f"TensorFlow, servers, {link}/s: {model}"
            yield _pascal(name, model, alone, link, "grpc", {hosts: found}, _PER_WORKER)


def _goyal() -> Iterator[PublishedRun]:
    four_mb = Buckets(limit=4 * 2**20)
    yield PublishedRun(
        name="Goyal et al., 50 Gbit/s: resnet50",
        layers=layers_of("resnet50"),
        batch_per_worker=32,
        alone=195.0,
        host=1485.0,
        workers_per_host=8,
        link=read_link("50Gbit"),
        points={32: 42768.0},
        policy=Policy("butterfly", four_mb),
        source="Goyal et al. 2017 (1706.02677): 90% of 32 hosts",
        transport=TRANSPORTS["rdma"],
        inside=INSIDE["nvlink"],
    )


def _k80() -> Iterator[PublishedRun]:
    """Yield hosts of 8 K80 with servers; the GPUs of a host sum first."""
    rows = (
        ("inception_v3", 64, 29.7, 229.0, {2: 459.0, 4: 902.0, 8: 1783.0}),
        ("resnet50", 64, 52.4, 378.0, {2: 751.0, 4: 1388.0, 8: 2744.0}),
        ("resnet152", 32, 19.4, 146.0, {2: 291.0, 4: 565.0, 8: 981.0}),
    )
    for model, batch, alone, host, points in rows:
        yield _eight_k80(f"K80, servers: {model}", model, batch, alone, host, points, _TABLE_2017)
    yield _eight_k80(
        "K80, servers, second group: inception_v3",
        "inception_v3",
        64,
        30.55,
        230.7,
        {2: 449.0, 4: 864.0, 8: 1731.0, 16: 3333.0},
        _SECOND,
        {2: 1, 4: 3, 8: 8, 16: 16},
    )


def _eight_k80(
    name: str,
    model: str,
    batch: int,
    alone: float,
    host: float,
    points: Mapping[int, float],
    source: str,
    servers: Mapping[int, int] | None = None,
) -> PublishedRun:
    return PublishedRun(
        name=name,
        layers=layers_of(model),
        batch_per_worker=batch,
        alone=alone,
        host=host,
        workers_per_host=8,
        link=read_link("10Gbit"),
        points=points,
        policy=_PER_HOST,
        source=source,
        transport=TRANSPORTS["grpc"],
        inside=INSIDE["pcie-k80"],
        servers=servers or {},
        extrapolates=True,
    )


def _v100() -> Iterator[PublishedRun]:
    """Yield ResNet-50 on hosts of 8 V100."""
    rows = (
        ("PyTorch DDP", 128, 354.4, 2719.0, _DDP_RING, {2: 5307.0, 4: 10632.0}),
        ("TensorFlow 1 and Horovod", 128, 362.4, 2722.0, _ONCE_A_RING, {2: 5099.0, 4: 9515.0}),
        ("MXNet and Horovod", 96, 389.7, 2948.0, _ONCE_A_RING, {2: 5685.0, 4: 10419.0}),
        ("TensorFlow 2", 128, 321.8, 2459.0, _DDP_RING, {2: 4850.0, 4: 9418.0}),
    )
    for name, batch, alone, host, policy, points in rows:
        yield PublishedRun(
            name=f"V100, InfiniBand 100 Gbit/s, {name}: resnet50",
            layers=layers_of("resnet50"),
            batch_per_worker=batch,
            alone=alone,
            host=host,
            workers_per_host=8,
            link=read_link("100Gbit"),
            points=points,
            policy=policy,
            source=_DLPERF,
            transport=TRANSPORTS["rdma"],
            inside=INSIDE["nvlink"],
            extrapolates=True,
        )
    yield PublishedRun(
        name="V100, cloud 25 Gbit/s, float16 gradients: resnet50",
        layers=layers_of("resnet50"),
        batch_per_worker=256,
        alone=872.0,
        host=6679.0,
        workers_per_host=8,
        link=read_link("25Gbit"),
        points={2: 12828.0, 4: 23870.0, 8: 47195.0, 16: 89783.0},
        policy=_ONCE_A_RING,
        source="horovod/horovod, issue 779 (batch of 256 assumed)",
        transport=TRANSPORTS["nccl"],
        inside=INSIDE["nvlink"],
        element=2,
        extrapolates=True,
    )


def _cray() -> Iterator[PublishedRun]:
    yield PublishedRun(
        name="Cray XC50, servers: inception_v3",
        layers=layers_of("inception_v3"),
        batch_per_worker=64,
        alone=138.23,
        workers_per_host=1,
        link=read_link("80Gbit"),
        points={8: 1018.18, 16: 2001.0, 32: 3840.0, 64: 7118.0, 128: 9220.0},
        policy=_PER_WORKER,
        source=_SECOND,
        transport=TRANSPORTS["grpc"],
        servers={8: 2, 16: 4, 32: 12, 64: 40, 128: 116},
        extrapolates=True,
    )


def published_runs() -> list[PublishedRun]:
    """Return all series, in the order of the table."""
    parts = (_horovod(), _goyal(), _k80(), _v100(), _tensorflow_servers(), _cray())
    return [run for part in parts for run in part]
