"""Runs a host discovery script: horovodrun's `--host-discovery-script`.

The script is a shell command of the user. It prints `host` or `host:slots`, one per line, and
exits. It may take 60 s and print 1 MB; beyond either limit it is killed with its children. The
first 64 KB of its standard error are kept for the error message. A fixed run calls it once; an
elastic run polls it (`launch.elastic.host_poll`).
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from allstep.errors import ConfigError, cut
from allstep.launch.hosts.host_list import Host, parse_host
from allstep.limits import read_seconds
from allstep.process.liveness import Life
from allstep.process.pipe import chunks_now

_SECONDS = 60.0
_MAX_OUTPUT = 1 << 20
_KEPT_ERRORS = 1 << 16


class Stopped(Exception):
    """The caller does not need the hosts any more; the script was killed."""


@dataclass(frozen=True)
class Discovery:
    """A discovery script. script: a shell command. seconds: time between two polls.

    slots_per_host: slots of a host that the script prints without a number.
    """

    script: str
    slots_per_host: int = 1
    seconds: float = 1.0

    @classmethod
    def given(cls, script: str, slots_per_host: int, env: Mapping[str, str]) -> "Discovery":
        """Return the discovery of a run; ConfigError for a bad ALLSTEP_DISCOVERY_SECONDS."""
        return cls(script, slots_per_host, read_seconds(env, ("ALLSTEP_DISCOVERY_SECONDS",), 1.0))

    def poll(self, stop: int | None = None) -> list[Host]:
        """Run the script and return the hosts that it prints, possibly none.

        stop: a descriptor; once it is readable, the script is killed and Stopped is raised. Raises
        ConfigError if the script fails, prints an invalid line, or exceeds its limits.
        """
        source = f"--host-discovery-script {self.script}"
        code, out, err = _run(self.script, source, stop)
        if code:
            line = err.decode(errors="replace").partition("\n")[0]
            raise ConfigError(f"{source} failed: exit code {code}, standard error {cut(line)!r}")
        try:
            lines = out.decode().split("\n")
        except UnicodeDecodeError:
            raise ConfigError(
                f"{source} printed bytes that are not UTF-8; expected one host per line"
            ) from None
        return _hosts(lines, source, self.slots_per_host)


def discover(script: str, slots_per_host: int) -> list[Host]:
    """Run `script`, a shell command, and return the hosts that it prints; ConfigError without one.

    slots_per_host: slots of a host that the script prints without a number.
    """
    if not (hosts := Discovery(script, slots_per_host).poll()):
        raise ConfigError(
            f"--host-discovery-script {script} named no host; expected one per line: h1:2"
        )
    return hosts


def _hosts(lines: list[str], source: str, slots_per_host: int) -> list[Host]:
    """Return the hosts of the lines, without repetitions; ConfigError for an invalid line."""
    found: dict[str, Host] = {}
    for line in filter(None, map(str.strip, lines)):
        host = parse_host(line, source, slots_per_host)
        before = found.setdefault(host.label, host)
        if before.slots != host.slots:
            raise ConfigError(
                f"{source} printed {host.label} with {before.slots} and with {host.slots} slots;"
                " expected one line per host"
            )
    return list(found.values())


def _run(script: str, source: str, stop: int | None) -> tuple[int, bytes, bytes]:
    """Run the script; return exit status, standard output and the start of standard error."""
    end = time.monotonic() + _SECONDS
    # A session of its own, so that the processes it starts can be killed with it.
    process = subprocess.Popen(
        script,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout and process.stderr
    try:
        with process.stdout, process.stderr:
            pipes = process.stdout.fileno(), process.stderr.fileno()
            out, err = _read(process.pid, *pipes, end, source, stop)
        return process.wait(max(0.0, end - time.monotonic())), out, err
    except (TimeoutError, subprocess.TimeoutExpired):
        raise ConfigError(f"{source} did not end within {_SECONDS:.0f} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(
    pid: int, out: int, err: int, end: float, source: str, stop: int | None
) -> tuple[bytes, bytes]:
    """Read both pipes until the process has ended; TimeoutError at the time `end`.

    The end of the pipes does not count: a process that the script left behind may hold them open.
    """
    found = {out: bytearray(), err: bytearray()}
    life = Life(pid)
    with selectors.DefaultSelector() as selector:
        selector.register(life, selectors.EVENT_READ)
        if stop is not None:
            selector.register(stop, selectors.EVENT_READ)
        for fd in found:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        has_ended = False
        while not has_ended:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError
            ready = {key.fileobj for key, _ in selector.select(left)}
            if stop in ready:
                raise Stopped
            # Checked before the last read: all output of the script itself is in the pipes by now.
            has_ended = life in ready
            for fd in [
                each
                for each in found
                if each in selector.get_map() and (has_ended or each in ready)
            ]:
                if not _take(fd, found[fd], _MAX_OUTPUT if fd == out else _KEPT_ERRORS):
                    selector.unregister(fd)
            if len(found[out]) > _MAX_OUTPUT:
                raise ConfigError(
                    f"{source} printed more than {_MAX_OUTPUT:,} bytes; expected one host per line"
                )
    return bytes(found[out]), bytes(found[err])


def _take(fd: int, found: bytearray, max_nbytes: int) -> bool:
    """Read the available bytes of a pipe, and keep slightly over `max_nbytes`; False at its end."""
    for chunk in chunks_now(fd):
        if not chunk:
            return False
        # Further bytes are read and dropped so that the writer can continue.
        if len(found) <= max_nbytes:
            found += chunk
    return True
