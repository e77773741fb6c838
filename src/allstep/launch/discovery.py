"""The hosts that a script prints: horovodrun's `--host-discovery-script`.

The script is a command of the user's for the shell. It prints `host` or `host:slots`, one per line,
and ends. It has 60 s, may print 1 MB, and is killed with its children when it exceeds either. Of
standard error the first 64 KB are kept, for the error that names the script.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time

from allstep.errors import ConfigError
from allstep.launch.hosts import Host, parse_hosts

_SECONDS = 60.0
_MAX_OUTPUT = 1 << 20
_KEPT_ERRORS = 1 << 16


def discover(script: str, slots_per_host: int) -> list[Host]:
    """Run the script and return the hosts it prints.

    slots_per_host: slots of a host that the script prints without a number.
    """
    source = f"--host-discovery-script {script}"
    code, out, err = _run(script, source)
    try:
        names = out.decode().split()
    except UnicodeDecodeError:
        raise ConfigError(f"{source} printed bytes that are not UTF-8; expected one host per line") from None
    if code or not names:
        said = err.decode(errors="replace").partition("\n")[0]
        raise ConfigError(f"{source} named no host: it ended with {code} and said {said!r}")
    text = ",".join(name if ":" in name else f"{name}:{slots_per_host}" for name in names)
    return parse_hosts(text, source)


def _run(script: str, source: str) -> tuple[int, bytes, bytes]:
    """Return exit status, standard output and the start of standard error."""
    end = time.monotonic() + _SECONDS
    # A session of its own: what the script has started can be killed with it.
    process = subprocess.Popen(
        script, shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout and process.stderr
    try:
        with process.stdout, process.stderr:
            out, err = _read(process.stdout.fileno(), process.stderr.fileno(), end, source)
        return process.wait(max(0.0, end - time.monotonic())), out, err
    except (TimeoutError, subprocess.TimeoutExpired):
        raise ConfigError(f"{source} did not end within {_SECONDS:.0f} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(out: int, err: int, end: float, source: str) -> tuple[bytes, bytes]:
    """Read both pipes to their ends; TimeoutError at the time `end`."""
    found = {out: bytearray(), err: bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in found:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fd)
                elif key.fd == out or len(found[err]) < _KEPT_ERRORS:
                    found[key.fd] += chunk
            if len(found[out]) > _MAX_OUTPUT:
                raise ConfigError(f"{source} printed more than {_MAX_OUTPUT:,} bytes; expected one host per line")
    return bytes(found[out]), bytes(found[err])
