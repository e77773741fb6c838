"""Starts agents on other hosts with the system's ssh, so that its configuration and keys apply.

The command line has only the interpreter and the agent's name; the environment and the token are
sent through ssh's standard input, where other users of the host cannot see them.

All variables are sent except those that belong to each host (`_NOT_FORWARDED`, `_HOSTS_OWN`). With
`--env-only`, only the listed variables are sent, and those without which workers do not start
(`_OURS`, `_PATHS`). The agent adds them to the host's own environment.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Collection
from difflib import get_close_matches

from allstep.errors import ConfigError
from allstep.process.python import module_flags

# Prefixes of variables; BASH_FUNC_ is that of shell functions.
_NOT_FORWARDED = ("BASH_FUNC_", "SSH_", "XDG_", "DBUS_")
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
# Sent also with --env-only: settings of allstep and of horovodrun's flags, and search paths.
_OURS = ("ALLSTEP_", "HOROVOD_")
_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def command_on(host: str, ssh: str, *python_arguments: str) -> list[str]:
    """Return the ssh command that runs this interpreter on a host, with these arguments."""
    path = os.environ.get("PYTHONPATH")
    setting = ["env", f"PYTHONPATH={path}"] if path else []
    remote = shlex.join(["exec", *setting, sys.executable, *python_arguments])
    options = ["-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    return [*split_command(ssh), *options, "--", host, remote]


def split_command(ssh: str) -> list[str]:
    """Return program and arguments of the user's ssh command; ConfigError if it is empty."""
    try:
        arguments = shlex.split(ssh)
    except ValueError as error:
        raise ConfigError(f"--ssh {ssh!a}: {error}; quote it as a shell command") from error
    if not arguments:
        raise ConfigError("--ssh is empty; expected a command, such as ssh")
    return arguments


def start_agent(host: str, label: str, ssh: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start the agent on a host; its stdout has the agent's messages, its stderr ssh's errors.

    arguments: further ones of the agent.
    """
    agent = module_flags("allstep.launch.agent_main")
    command = command_on(host, ssh, *agent, label, *arguments)
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
            f"cannot start {command[0]!r} to reach {label}: {error.strerror}; install an ssh"
            " client, or set another command with --ssh"
        ) from error


def forwarded(env: dict[str, str], only: Collection[str] | None = None) -> dict[str, str]:
    """Return the variables of `env` to send to another host.

    only: the names of `--env-only`; None (default) for all.
    """
    sent = {name: value for name, value in env.items() if not _belongs_to_host(name)}
    if only is None:
        return sent
    kept = {*only, *_PATHS}
    return {name: value for name, value in sent.items() if name in kept or name.startswith(_OURS)}


def parse_env_only(text: str, env: Collection[str]) -> frozenset[str]:
    """Return the names in `text` (`--env-only`), separated by commas; `env` must have each of them.

    An empty text names none. Raises ConfigError for other variables.
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


def describe_failure(label: str, code: int | None, stderr: str, stdout: str = "") -> str:
    """Return one line about an agent that did not start.

    code: exit code of ssh. stdout: the output instead of its first message.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else stdout or "it printed nothing"
    if code == 255:
        attempt = f"ssh -o BatchMode=yes -- {shlex.quote(label)} true"
        return f"ssh to {label} failed: {reason}. Try `{attempt}`"
    if "No module named" in stderr:
        return f"{label}: {reason}: allstep must be installed there for {sys.executable}"
    if code in (126, 127):
        return (
            f"{label}: {reason}: the interpreter must be at the same place on every host"
            f" ({sys.executable})"
        )
    return f"{label}: the agent ended with {code} before its hello: {reason}"
