"""The Python packages that allstep needs or can use, from its own metadata: what is declared is
what is looked for."""

import re
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Package:
    """`version` None: not installed.

    `extra`: the extra of allstep that asks for it; None when allstep needs it.
    `below`: the first version that is not supported, where there is an upper bound.
    """

    name: str
    least: str | None
    version: str | None
    extra: str | None
    below: str | None = None

    @property
    def good(self) -> bool:
        return self.version is not None and (
            self.least is None or at_least(self.version, self.least)
        )


def packages() -> list[Package]:
    """Those that allstep declares, without what only its own tests need."""
    try:
        declared = metadata.requires("allstep") or []
    except metadata.PackageNotFoundError:
        return []
    found = [package for line in declared if (package := _package(line)) is not None]
    return [package for package in found if package.extra != "test"]


def _package(line: str) -> Package | None:
    match = re.match(
        r"([\w.-]+)(?:[^;]*?>=([\w.]+))?[^;]*(?:;.*extra == ['\"]([\w-]+)['\"])?", line
    )
    if match is None:
        return None
    below = re.match(r"[^;]*<([\w.]+)", line)
    return Package(match[1], match[2], version_of(match[1]), match[3], below[1] if below else None)


def version_of(name: str) -> str | None:
    """The installed version, found without importing anything."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def at_least(version: str, least: str) -> bool:
    return _numbers(version) >= _numbers(least)


def _numbers(version: str) -> list[int]:
    """`2.13.0+cpu` as [2, 13, 0]; what follows the numbers does not count."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return [int(part) for part in match[0].split(".")] if match else []
