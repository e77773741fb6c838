"""Table of horovodrun's flags: spelling, environment variables in the workers, key in a YAML file.

    horovodrun -np 2 --fusion-threshold-mb 32 --autotune --config-file job.yaml python train.py
                        |
                        v
    HOROVOD_FUSION_THRESHOLD=33554432         only given flags are exported;
    HOROVOD_AUTOTUNE=1                        the command line takes precedence over the file

A flag whose mechanism allstep does not have is accepted all the same, so that job scripts run
unchanged; `idle_line` names it together with what happens instead. A flag with neither variables
nor such a reason is handled in `run.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.errors import ConfigError, did_you_mean

LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
Values = dict[str, Any]


def _switch(on: bool) -> str:
    """Return a switch as the value of an environment variable."""
    return "1" if on else "0"


def _opposite(on: bool) -> str:
    """Return the value of a variable that means the opposite of its flag."""
    return _switch(not on)


def _megabytes(number: int) -> str:
    """Return a number of megabytes as bytes."""
    return str(number << 20)


@dataclass(frozen=True)
class Flag:
    """One flag of horovodrun. Numbers are never negative."""

    name: str
    """Key of its value in `Values`."""
    spelled: tuple[str, ...]
    """Spellings on the command line; "--a/--no-a" is a switch."""
    kind: Any
    """Type of its value."""
    variables: tuple[str, ...] = ()
    """Environment variables of the workers that it sets."""
    written: Callable[[Any], str] = str
    """Function from its value to that of the variables."""
    key: str = ""
    """Its key in the YAML file: section.key."""
    needs: str = ""
    """Name of a flag without which this one is not exported."""
    instead: str = ""
    """Reason why it has no effect in allstep; empty: it has one."""
    max_value: float | None = None
    """Largest value that is allowed."""


def _flag(spelled: str, kind: Any, *variables: str, name: str = "", **more: Any) -> Flag:
    """Return a flag; its name follows from its last spelling, separated by spaces in `spelled`."""
    names = tuple(spelled.split())
    if kind is bool:
        more = {"written": _switch, **more}
    return Flag(
        name or names[-1].partition("/")[0].lstrip("-").replace("-", "_"),
        names,
        kind,
        variables,
        **more,
    )


def _tunable(name: str, kind: Any, variable: str, **more: Any) -> Flag:
    """Return a flag of the section `params` of the YAML file."""
    spelled = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
    return _flag(spelled, kind, variable, key=f"params.{name.replace('-', '_')}", **more)


def _autotune(name: str, kind: Any, variable: str = "", **more: Any) -> Flag:
    """Return a flag of the section `autotune`, without effect unless --autotune is on."""
    variable = variable or f"HOROVOD_AUTOTUNE_{name.replace('-', '_').upper()}"
    return _flag(
        f"--autotune-{name}",
        kind,
        variable,
        key=f"autotune.{name.replace('-', '_')}",
        needs="autotune",
        **more,
    )


def _library(name: str, kind: Any, *variables: str, **more: Any) -> Flag:
    """Return a flag of the section `library_options` of the YAML file."""
    spelled = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
    return _flag(spelled, kind, *variables, key=f"library_options.{name.replace('-', '_')}", **more)


_ENGINE = "allstep's own engine runs every operation"
_NO_MPI = "allstep does not use mpirun"
_HIERARCHY = "allstep always uses shared memory on a host and one stream between hosts"
_WAITING = "the thread that waits for an operation also runs it, on its own core"

FLAGS: tuple[Flag, ...] = (
    # Starting and output.
    _flag("--num-proc", int),
    _flag("--host-discovery-script", str),
    _flag("--slots-per-host", int),
    _flag("--network-interface --network-interfaces", list[str]),
    _flag("-p --ssh-port", int),
    _flag("-i --ssh-identity-file", str),
    _flag("--output-filename", str),
    _flag("-prefix-timestamp --prefix-output-with-timestamp", bool),
    _flag("--verbose", bool),
    _flag("--config-file", Path),
    # horovodrun caches its checks of hosts; allstep has no such cache.
    _flag("--disable-cache", bool),
    _flag("--start-timeout", int, "HOROVOD_START_TIMEOUT", "ALLSTEP_START_TIMEOUT"),
    # Tunables.
    _tunable("fusion-threshold-mb", int, "HOROVOD_FUSION_THRESHOLD", written=_megabytes),
    _tunable("cycle-time-ms", float, "HOROVOD_CYCLE_TIME"),
    _tunable("cache-capacity", int, "HOROVOD_CACHE_CAPACITY"),
    _tunable("hierarchical-allreduce", bool, "HOROVOD_HIERARCHICAL_ALLREDUCE", instead=_HIERARCHY),
    _tunable("hierarchical-allgather", bool, "HOROVOD_HIERARCHICAL_ALLGATHER", instead=_HIERARCHY),
    _tunable("torus-allreduce", bool, "HOROVOD_TORUS_ALLREDUCE", instead=_HIERARCHY),
    # Autotuning.
    _flag("--autotune/--no-autotune", bool, "HOROVOD_AUTOTUNE", key="autotune.enabled"),
    _autotune("log-file", str, "HOROVOD_AUTOTUNE_LOG"),
    _autotune("warmup-samples", int),
    _autotune("steps-per-sample", int),
    _autotune("bayes-opt-max-samples", int),
    _autotune("gaussian-process-noise", float, max_value=1.0),
    # Elastic.
    _flag("--min-np --min-num-proc", int, name="min_np"),
    _flag("--max-np --max-num-proc", int, name="max_np"),
    _flag("--elastic-timeout", int),
    _flag("--reset-limit", int),
    _flag("--blacklist-cooldown-range", tuple[int, int]),
    # Timeline and stall check.
    _flag("--timeline-filename", str, "HOROVOD_TIMELINE", key="timeline.filename"),
    _flag(
        "--timeline-mark-cycles/--no-timeline-mark-cycles",
        bool,
        "HOROVOD_TIMELINE_MARK_CYCLES",
        key="timeline.mark_cycles",
        needs="timeline_filename",
    ),
    _flag(
        "--stall-check/--no-stall-check",
        bool,
        "HOROVOD_STALL_CHECK_DISABLE",
        written=_opposite,
        key="stall_check.enabled",
    ),
    _flag(
        "--stall-check-warning-time-seconds",
        int,
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "ALLSTEP_STALL_SECONDS",
        key="stall_check.warning_time_seconds",
    ),
    _flag(
        "--stall-check-shutdown-time-seconds",
        int,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        key="stall_check.shutdown_time_seconds",
    ),
    # Libraries.
    _library("mpi-threads-disable", bool, "HOROVOD_MPI_THREADS_DISABLE", instead=_NO_MPI),
    _library("num-nccl-streams", int, "HOROVOD_NUM_NCCL_STREAMS", instead=_ENGINE),
    _library("thread-affinity", int, "HOROVOD_THREAD_AFFINITY", instead=_WAITING),
    _library("gloo-timeout-seconds", int, "HOROVOD_GLOO_TIMEOUT_SECONDS", "ALLSTEP_TIMEOUT"),
    _flag("--mpi-args", str, instead=_NO_MPI),
    _flag("--binding-args", str, instead=_NO_MPI),
    _flag("--tcp", bool, "NCCL_IB_DISABLE"),
    # Logging; --log-hide-timestamp is the older name of --log-without-timestamp.
    _flag("--log-level", str, "HOROVOD_LOG_LEVEL", written=str.upper, key="logging.level"),
    _flag(
        "--log-with-timestamp/--log-without-timestamp",
        bool,
        "HOROVOD_LOG_HIDE_TIME",
        written=_opposite,
        key="logging.with_timestamp",
    ),
    _flag("--log-hide-timestamp/--no-log-hide-timestamp", bool, "HOROVOD_LOG_HIDE_TIME"),
    # Controller.
    _flag("--gloo", bool, instead=_ENGINE),
    _flag("--mpi", bool, instead=_ENGINE),
    _flag("--jsrun", bool, instead="allstep starts the workers itself"),
)
_BY_KEY = {flag.key: flag for flag in FLAGS if flag.key}
CONTROLLERS = ("gloo", "mpi")


def variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of the workers that the given flags set.

    Raise ConfigError for a value out of range or for controllers that exclude each other.
    """
    for flag in FLAGS:
        _check(flag, values.get(flag.name), flag.spelled[0].partition("/")[0])
    chosen = [name for name in (*CONTROLLERS, "jsrun") if values.get(name)]
    if len(chosen) > 1:
        raise ConfigError(
            f"--{' and --'.join(chosen)} exclude each other; give one of them or none"
        )
    return {
        variable: flag.written(values[flag.name])
        for flag in FLAGS
        if values.get(flag.name) is not None and (not flag.needs or values.get(flag.needs))
        for variable in flag.variables
    }


def _check(flag: Flag, value: Any, where: str) -> None:
    """Raise ConfigError if a value is out of range; `where` is the flag or key, for the message."""
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        if number < 0 or (flag.max_value is not None and number > flag.max_value):
            allowed = "at least 0" if flag.max_value is None else f"from 0 to {flag.max_value:g}"
            raise ConfigError(f"{where} {number}: the number must be {allowed}")
    if flag.name == "log_level" and value is not None and value.upper() not in LOG_LEVELS:
        raise ConfigError(f"{where} {value}: {did_you_mean(value.upper(), LOG_LEVELS)}")


def idle_line(values: Mapping[str, Any]) -> str:
    """Return one line with the given flags that have no effect in allstep, and the reasons.

    The line is empty if there are none.
    """
    reasons: dict[str, list[str]] = {}
    for flag in FLAGS:
        value = values.get(flag.name)
        if flag.instead and value is not None and value is not False:
            reasons.setdefault(flag.instead, []).append(flag.spelled[0].partition("/")[0])
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())


def read_config(path: Path) -> tuple[Values, list[str]]:
    """Return the flags that a YAML file of horovodrun sets, and its keys that no flag has."""
    document = _load(path)
    values: Values = {}
    unknown: list[str] = []
    for section, entries in document.items():
        if section == "controller":
            values[_controller(entries, path)] = True
            continue
        for key, value in entries.items() if isinstance(entries, dict) else [("", entries)]:
            place = f"{section}.{key}".rstrip(".")
            flag = _BY_KEY.get(place)
            if flag is None:
                unknown.append(place)
            elif value is not None:
                values[flag.name] = _typed(flag, value, f"{path}: {place}")
    return values, unknown


def _load(path: Path) -> dict[str, Any]:
    """Read the YAML file; raise ConfigError if it cannot be read or has no sections."""
    from allstep.files.yaml import read_yaml

    try:
        document = read_yaml(path).value
    except FileNotFoundError as error:
        raise ConfigError(f"--config-file {path}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"--config-file {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(
            f"--config-file {path}: expected sections like `params:`, found"
            f" {type(document).__name__}"
        )
    return document


def _controller(name: Any, path: Path) -> str:
    """Return the controller that the file names, as the name of its flag."""
    if not isinstance(name, str) or name.lower() not in CONTROLLERS:
        raise ConfigError(f"{path}: controller: {name!r} is not one of {', '.join(CONTROLLERS)}")
    return name.lower()


def _typed(flag: Flag, value: Any, where: str) -> Any:
    """Return a value of the YAML file; raise ConfigError if its type or range is wrong."""
    if flag.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, flag.kind) or (flag.kind is int and isinstance(value, bool)):
        raise ConfigError(f"{where}: {value!r} is not of type {flag.kind.__name__}")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(
            f"{where}: {value!r} contains a NUL byte, which an environment variable cannot"
        )
    _check(flag, value, f"{where}:")
    return value
