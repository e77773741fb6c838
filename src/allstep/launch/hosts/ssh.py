"""Another host, through the system's own ssh: the user's configuration, keys and jump hosts all
hold.

On the command line stands nothing but the interpreter and the agent's name; the environment and the
token follow through ssh's standard input.

Of the environment all is sent but what belongs to each host (`_NOT_FORWARDED`, `_HOSTS_OWN`); with
`--env-only` just the variables named there and those without which workers do not start (`_OURS`,
`_PATHS`). The agent adds them to the host's own environment.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Collection
from difflib import get_close_matches

from allstep.errors import ConfigError
from allstep.process.python import module_flags

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
# Sent also with --env-only: settings of allstep and of horovodrun's flags, and where programs and
# modules are.
_OURS = ("ALLSTEP_", "HOROVOD_")
_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def command_on(host: str, ssh: str, *python_arguments: str) -> list[str]:
    """The ssh command that runs our interpreter on a host, with these arguments."""
    path = os.environ.get("PYTHONPATH")
    setting = ["env", f"PYTHONPATH={path}"] if path else []
    remote = shlex.join(["exec", *setting, sys.executable, *python_arguments])
    return [
        *split_command(ssh),
        "-T",
        "-x",
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=10",
        "--",
        host,
        remote,
    ]


def split_command(ssh: str) -> list[str]:
    """Return the words of the ssh command that the user gave; ConfigError when it has none."""
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise ConfigError(f"--ssh {ssh!a}: {error}; quote it as a shell command") from error
    if not words:
        raise ConfigError("--ssh is empty; expected a command, such as ssh")
    return words


def start_agent(host: str, label: str, ssh: str) -> subprocess.Popen[bytes]:
    """Start the agent on a host. Its messages come on stdout, what ssh complains of on stderr."""
    command = command_on(host, ssh, *module_flags("allstep.launch.agent_main"), label)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(
            f"cannot start {command[0]!r} to reach {label}: {error.strerror}; is an ssh client"
            " installed?"
        ) from error


def forwarded(env: dict[str, str], only: Collection[str] | None = None) -> dict[str, str]:
    """Return the part of our environment that makes sense on another host.

    only: the names given by `--env-only`; None for all.
    """
    sent = {name: value for name, value in env.items() if not _belongs_to_host(name)}
    if only is None:
        return sent
    kept = {*only, *_PATHS}
    return {name: value for name, value in sent.items() if name in kept or name.startswith(_OURS)}


def parse_env_only(text: str, env: Collection[str]) -> frozenset[str]:
    """Return the names in the text of `--env-only`: separated by commas, each set in `env`.

    An empty text names none.
    """
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    for name in sorted(names):
        if name not in env:
            near = get_close_matches(name, env, n=1)
            advice = f"did you mean {near[0]!r}?" if near else "set it or leave it out"
            raise ConfigError(f"--env-only {name}: no such variable in the environment; {advice}")
        if _belongs_to_host(name):
            raise ConfigError(
                f"--env-only {name}: this variable belongs to each host and is never sent; "
                "leave it out, or pass its value under another name"
            )
    return names


def _belongs_to_host(name: str) -> bool:
    return name.startswith(_NOT_FORWARDED) or name in _HOSTS_OWN


def complaint(label: str, code: int | None, stderr: str, stdout: str = "") -> str:
    """One line for an agent that did not come up. stdout: what came instead of its first message."""
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    reason = said[-1] if said else stdout or "it said nothing"
    if code == 255:
        return (
            f"ssh to {label} failed: {reason}. Try `ssh -o BatchMode=yes -- {shlex.quote(label)}"
            " true`"
        )
    if "No module named" in stderr:
        return f"{label}: {reason}: allstep must be installed there for {sys.executable}"
    if code in (126, 127):
        return (
            f"{label}: {reason}: the interpreter must be at the same place on every host"
            f" ({sys.executable})"
        )
    return f"{label}: the agent ended with {code} before it said hello: {reason}"
