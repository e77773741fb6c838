"""Another host, through the system's own ssh: the user's configuration, keys and jump hosts all hold.

On the command line stands nothing but the interpreter and the agent's name; the environment and the token follow through ssh's
standard input.
"""

import os
import shlex
import subprocess
import sys

from allstep.errors import ConfigError

_NOT_FORWARDED = (
    "BASH_FUNC_",  # shell functions
    "SSH_",
    "XDG_",
    "DBUS_",
)
_HOSTS_OWN = (
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "HOSTNAME",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "TERM",
    "TMPDIR",
    "MAIL",
    "DISPLAY",
    "XAUTHORITY",
)


def command_on(host: str, ssh: str, *python_arguments: str) -> list[str]:
    """The ssh command that runs our interpreter on a host, with these arguments."""
    path = os.environ.get("PYTHONPATH")
    setting = ["env", f"PYTHONPATH={path}"] if path else []
    remote = shlex.join(["exec", *setting, sys.executable, *python_arguments])
    return [*shlex.split(ssh), "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--", host, remote]


def start_agent(host: str, label: str, ssh: str) -> subprocess.Popen[bytes]:
    """Start the agent on a host. Its messages come on stdout, what ssh complains of on stderr."""
    command = command_on(host, ssh, "-m", "allstep.launch.agent", label)
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise ConfigError(
            f"cannot start {command[0]!r} to reach {label}: {error.strerror}; is an ssh client installed?"
        ) from error


def forwarded(env: dict[str, str]) -> dict[str, str]:
    """The part of our environment that makes sense on another host."""
    return {
        name: value for name, value in env.items() if not name.startswith(_NOT_FORWARDED) and name not in _HOSTS_OWN
    }


def complaint(label: str, code: int | None, stderr: str) -> str:
    """One line for an agent that did not come up."""
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    reason = said[-1] if said else "it said nothing"
    if code == 255:
        return f"ssh to {label} failed: {reason}. Try `ssh -o BatchMode=yes -- {shlex.quote(label)} true`"
    if "No module named" in stderr:
        return f"{label}: {reason}: allstep must be installed there for {sys.executable}"
    if code in (126, 127):
        return f"{label}: {reason}: the interpreter must be at the same place on every host ({sys.executable})"
    return f"{label}: the agent ended with {code} before it said hello: {reason}"
