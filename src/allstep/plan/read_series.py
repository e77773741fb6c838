"""Reads the user's own series of runs, to check how far predictions can be trusted there.

The file is a YAML list; `docs/planner.md` describes its fields.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from allstep.errors import ConfigError, did_you_mean
from allstep.files.yaml import read_yaml
from allstep.plan.models import MODELS, Layer, layers_of
from allstep.plan.published_runs import PublishedRun
from allstep.plan.setting import ALLSTEP, DDP, HOROVOD_2021, Buckets, Policy, Servers
from allstep.plan.simulator import ALGORITHMS
from allstep.plan.transports import INSIDE, TRANSPORTS, read_link

_REQUIRED = ("name", "batch_per_worker", "alone", "workers_per_host", "link", "points")
_OPTIONAL = ("source", "model", "layers", "host", "transport", "inside", "policy")
_OF_POLICY = ("algorithm", "buckets", "overlap", "gradients", "servers", "sum_in_host", "split")
_BUCKETS = {"allstep": ALLSTEP, "ddp": DDP, "horovod": HOROVOD_2021}
_OF_BUCKETS = ("bucket_mb", "first_bucket_mb", "tick_ms")
_ELEMENTS = {"float32": 4, "float16": 2, "bfloat16": 2}
_MOST = 10_000_000
_MB = 1e6

Item = TypeVar("Item")


def read_series(path: Path) -> list[PublishedRun]:
    """Return the series in a file; ConfigError names the series and the field that is wrong."""
    try:
        found = read_yaml(path).value
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file of series") from None
    if not isinstance(found, list) or not found:
        raise ConfigError(
            f"{path}: expected a list of series, each beginning with `- name:`; found"
            f" {type(found).__name__}"
        )
    return [_Reader(str(path), number, each).series() for number, each in enumerate(found, 1)]


class _Reader:
    """Reads one series."""

    def __init__(self, path: str, number: int, found: Any) -> None:
        self._where = f"{path}, series {number}"
        self._found = self._mapping("series", found)
        if isinstance(name := self._found.get("name"), str):
            self._where += f" ({name[:60]})"
        self._check_names(self._found, (*_REQUIRED, *_OPTIONAL))
        for each in _REQUIRED:
            if each not in self._found:
                raise self._error(f"the field {each} is missing")

    def series(self) -> PublishedRun:
        plain = self._mapping("policy", self._found.get("policy", {}))
        self._check_names(plain, (*_OF_POLICY, *_OF_BUCKETS), "policy.")
        per_host = self._whole("workers_per_host", self._found["workers_per_host"])
        points = self._points()
        transport, inside = self._found.get("transport"), self._found.get("inside", "pcie")
        return PublishedRun(
            name=str(self._found["name"])[:200],
            layers=self._layers(),
            batch_per_worker=self._whole("batch_per_worker", self._found["batch_per_worker"]),
            alone=self._positive("alone", self._found["alone"]),
            workers_per_host=per_host,
            link=self._parsed("link", read_link),
            points=points,
            policy=self._policy(plain),
            source=str(self._found.get("source", ""))[:200],
            host=self._positive("host", self._found["host"]) if "host" in self._found else None,
            transport=None if transport is None else self._of(TRANSPORTS, "transport", transport),
            inside=self._of(INSIDE, "inside", inside),
            element=self._of(_ELEMENTS, "policy.gradients", plain.get("gradients", "float32")),
            servers=self._servers(plain, points),
            extrapolates=len(points) > 1,
        )

    def _points(self) -> dict[int, float]:
        found = self._mapping("points", self._found["points"])
        points = {
            self._whole("points", hosts): self._positive(f"points.{hosts}", value)
            for hosts, value in found.items()
        }
        if not points or min(points) < 2:
            raise self._error(
                "points: expected hosts: samples/s, from 2 hosts on; the speed of one full host is"
                " the field host"
            )
        return dict(sorted(points.items()))

    def _layers(self) -> tuple[Layer, ...]:
        model, layers = self._found.get("model"), self._found.get("layers")
        if (model is None) == (layers is None):
            raise self._error(
                "expected one of model and layers: a name such as"
                " resnet50, or [[parameters, FLOP per sample], ...] in forward order"
            )
        if model is not None:
            return layers_of(self._of({name: name for name in MODELS}, "model", model))
        if not isinstance(layers, list) or not layers:
            raise self._error("layers: expected [[parameters, FLOP per sample], ...]")
        return tuple(self._layer(each) for each in layers)

    def _layer(self, found: Any) -> Layer:
        if not isinstance(found, list) or len(found) != 2:
            raise self._error(
                f"layers: expected [parameters, FLOP per sample], found {found!r:.60}"
            )
        parameters, flop = found
        return Layer(
            self._whole("layers", parameters, 10**12), self._positive("layers, FLOP", flop)
        )

    def _policy(self, plain: Mapping[str, Any]) -> Policy:
        algorithm = str(plain.get("algorithm", "auto"))
        self._of({name: name for name in ALGORITHMS}, "policy.algorithm", algorithm)
        overlap = self._flag(plain, "overlap", True)
        servers = None
        if "servers" in plain:
            in_host = self._flag(plain, "sum_in_host", False)
            servers = Servers(sum_in_host=in_host, split=self._flag(plain, "split", False))
        return Policy(algorithm, self._buckets(plain), overlap, servers=servers)

    def _buckets(self, plain: Mapping[str, Any]) -> Buckets:
        buckets = self._of(_BUCKETS, "policy.buckets", plain.get("buckets", "allstep"))
        for name, field, unit in (
            ("bucket_mb", "limit", _MB),
            ("first_bucket_mb", "first", _MB),
            ("tick_ms", "tick", 1e-3),
        ):
            if name in plain:
                value = unit * self._positive(f"policy.{name}", plain[name])
                buckets = replace(buckets, **{field: value})
        return buckets

    def _servers(self, plain: Mapping[str, Any], points: Mapping[int, float]) -> dict[int, int]:
        found = plain.get("servers", "hosts")
        if found == "hosts":
            return {}
        if isinstance(found, int):
            return dict.fromkeys(points, self._whole("policy.servers", found))
        by_hosts = self._mapping("policy.servers", found)
        return {
            self._whole("policy.servers", hosts): self._whole("policy.servers", count)
            for hosts, count in by_hosts.items()
        }

    # One value

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"{self._where}: {text}")

    def _mapping(self, name: str, found: Any) -> dict[Any, Any]:
        if not isinstance(found, dict):
            raise self._error(f"{name}: expected `field: value`, found {found!r:.60}")
        return found

    def _check_names(self, found: Mapping[Any, Any], names: tuple[str, ...], of: str = "") -> None:
        for each in found:
            if each not in names:
                raise self._error(
                    f"unknown field {of}{each!s:.60}; {did_you_mean(str(each), names)}"
                )

    def _of(self, table: Mapping[str, Item], name: str, found: Any) -> Item:
        if not isinstance(found, str) or found not in table:
            raise self._error(
                f"{name}: {found!r:.60} is unknown; {did_you_mean(str(found), table)}"
            )
        return table[found]

    def _parsed(self, name: str, read: Callable[[str], Item]) -> Item:
        try:
            return read(str(self._found[name]))
        except ConfigError as error:
            raise self._error(str(error)) from None

    def _positive(self, name: str, found: Any) -> float:
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not isfinite(found) or not found > 0:
            raise self._error(f"{name}: expected a number above 0, found {found!r:.60}")
        return float(found)

    def _whole(self, name: str, found: Any, most: int = _MOST) -> int:
        is_whole = isinstance(found, int) and not isinstance(found, bool)
        if not is_whole or not 1 <= found <= most:
            raise self._error(
                f"{name}: expected a whole number from 1 to {most}, found {found!r:.60}"
            )
        return int(found)

    def _flag(self, found: Mapping[str, Any], name: str, default: bool) -> bool:
        value = found.get(name, default)
        if not isinstance(value, bool):
            raise self._error(f"policy.{name}: expected true or false, found {value!r:.60}")
        return value
