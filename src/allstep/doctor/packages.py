"""The Python packages that allstep's metadata declares, with the versions that are installed."""

import re
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Package:
    """A package that allstep needs or can use."""

    name: str
    least: str | None
    """Lowest version that allstep accepts; None: any."""
    version: str | None
    """Installed version; None: not installed."""
    extra: str | None
    """Extra of allstep that requires it; None: allstep itself does."""
    below: str | None = None
    """First version that allstep does not support; None: no upper bound."""

    @property
    def good(self) -> bool:
        """Whether it is installed in a version that allstep accepts."""
        return self.version is not None and (
            self.least is None or at_least(self.version, self.least)
        )


def packages() -> list[Package]:
    """Return the packages that allstep declares, without those of its extra `test`."""
    try:
        declared = metadata.requires("allstep") or []
    except metadata.PackageNotFoundError:
        return []
    found = [package for line in declared if (package := _package(line)) is not None]
    return [package for package in found if package.extra != "test"]


def _package(line: str) -> Package | None:
    """Return the package of a requirement such as `torch>=2.4; extra == 'gpu'`."""
    match = re.match(
        r"([\w.-]+)(?:[^;]*?>=([\w.]+))?[^;]*(?:;.*extra == ['\"]([\w-]+)['\"])?", line
    )
    if match is None:
        return None
    below = re.match(r"[^;]*<([\w.]+)", line)
    return Package(match[1], match[2], version_of(match[1]), match[3], below[1] if below else None)


def version_of(name: str) -> str | None:
    """Return the installed version of a package, without importing it; None: not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def at_least(version: str, least: str) -> bool:
    """Return whether `version` is `least` or later."""
    return _numbers(version) >= _numbers(least)


def _numbers(version: str) -> list[int]:
    """Return the numbers of a version, without a suffix: [2, 13, 0] for `2.13.0+cpu`."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return [int(part) for part in match[0].split(".")] if match else []
