"""The agent: one process per host that starts that host's workers, passes on what they print, and
cleans up after them.

    launcher --- socket pair --- agent on this host   --- worker, worker
             --- ssh ----------- agent on another one --- worker, worker

The agent is the workers' parent, and nothing that it started outlives it:

* the launcher is gone (end of file, or from another host no sign of life for 0.7 of `lost`
  seconds): everything is killed;
* the agent itself is killed: the kernel kills the workers (PR_SET_PDEATHSIG);
* a worker leaves processes behind, even in a session of their own: as "subreaper" the agent
  inherits and finds them.

Each worker leads a session of its own, so a signal reaches its whole process group and Ctrl-C at
the terminal only the launcher.

The messages of both directions are in `messages`.
"""

import contextlib
import errno
import fcntl
import os
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Literal, NamedTuple

from allstep import machine, wire
from allstep.launch import horovod
from allstep.launch.link import FULL, Link
from allstep.launch.messages import (
    Alive,
    BadMessage,
    Exit,
    Finish,
    Hello,
    Kill,
    Lines,
    Message,
    Problem,
    Signal,
    Start,
    Started,
    WorkerOrder,
)
from allstep.launch.output import lines
from allstep.limits import read_limits
from allstep.process.family import adopt_orphans, descendants, die_with_parent, reap
from allstep.process.liveness import Life, life_of

_STILL_SECONDS = 1.0  # a beat that comes so late was held up by the machine
_DYING_SECONDS = (
    4.0  # on a busy machine also those who were killed need a while; the launcher waits for 5 s
)


class CannotStart(Exception):
    """Why this host cannot start its workers, in one line."""


class Worker(NamedTuple):
    """A started worker."""

    rank: int
    process: subprocess.Popen[bytes]
    life: Life


class Agent:
    """Runs until its workers are gone and the launcher says finish, or until the launcher is gone."""

    def __init__(self, link: Link, host: str, *, remote: bool) -> None:
        self.link = link
        self.host = host
        self.remote = remote
        defaults = read_limits({})  # until the launcher sends its own
        self.lost_seconds, self.beat_seconds = defaults.lost_for_agent, defaults.beat
        self.heard = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.workers: dict[int, Worker] = {}
        self.running: set[int] = set()
        self._ended: list[
            tuple[int, int]
        ] = []  # rank and exit code of workers whose end has not been reported
        self.done = False
        self.port_holder = _hold_port()
        self.oom_kills = machine.oom_kills()
        self.streams: list[_Stream] = []
        self._full = False
        self._room: int | None = None

    def run(self) -> None:
        """Serve the launcher until there is nothing left to do; then leave nothing behind."""
        adopt_orphans()
        self.selector.register(self.link.read_fd, selectors.EVENT_READ, self._hear)
        self._greet()
        next_beat = time.monotonic() + self.beat_seconds
        try:
            while not self.done and not self.link.ended:
                self._wait_for_room()
                for key, _ in self.selector.select(max(0.0, next_beat - time.monotonic())):
                    key.data()
                if (now := time.monotonic()) >= next_beat:
                    # While we stood still ourselves (stopped, or the whole machine was) the
                    # launcher's silence does not count.
                    if now - next_beat > _STILL_SECONDS:
                        self.heard = min(now, self.heard + now - next_beat)
                    next_beat = now + self.beat_seconds
                    self._beat()
                self.link.flush()
                self._mind_the_outbox()
        finally:
            self._clean_up()

    def _greet(self) -> None:
        ssh = os.environ.get(
            "SSH_CONNECTION", ""
        ).split()  # the launcher's address and port, then ours
        by_ssh = self.remote and len(ssh) == 4
        self.link.send(
            Hello(
                port=self.port_holder.getsockname()[1],
                interfaces=machine.interfaces(),
                launcher_address=ssh[0] if by_ssh else None,
                address=ssh[2] if by_ssh else None,
            )
        )

    def _beat(self) -> None:
        if not self.link.outbox:
            self.link.send(Alive())
        if self.remote and time.monotonic() - self.heard > self.lost_seconds:
            # On standard error, which has a way of its own to the launcher if that is back.
            silence = time.monotonic() - self.heard
            print(
                f"no sign of life from the launcher for {silence:.0f} s: the agent ended its"
                " workers",
                file=sys.stderr,
            )
            self.link.ended = True

    def _wait_for_room(self) -> None:
        """Let the selector return as soon as the launcher takes more, while there is more for it."""
        waits = bool(self.link.outbox)
        if waits and self._room is None:
            # A descriptor of its own, since both directions of the link may be one socket.
            self._room = os.dup(self.link.write_fd)
            self.selector.register(self._room, selectors.EVENT_WRITE, self.link.flush)
        elif not waits and self._room is not None:
            self.selector.unregister(self._room)
            os.close(self._room)
            self._room = None

    def _mind_the_outbox(self) -> None:
        """Stop reading from the workers while the launcher does not take what they said; they wait
        in their turn."""
        full = len(self.link.outbox) > FULL
        if full != self._full:
            self._full = full
            for stream in self.streams:
                stream.pause() if full else stream.resume()

    def _hear(self) -> None:
        try:
            for message in self.link.receive():
                self.heard = time.monotonic()
                self._take(message)
        except BadMessage as bad:
            # Leave: a launcher that this agent does not understand may not be able to end it.
            self.link.send(Problem(bad.described("the launcher")))
            self.done = True

    def _take(self, message: Message) -> None:
        match message:
            case Start():
                self._on_start(message)
            case Signal():
                self._signal(message.number)
            case Kill():
                self._signal(signal.SIGKILL)
            case Finish():
                self.done = True

    def _signal(self, number: int) -> None:
        """Send a signal to the process group of every running worker."""
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.workers[rank].process.pid, number)

    def _on_start(self, message: Start) -> None:
        self.lost_seconds, self.beat_seconds = message.lost, message.beat
        try:
            common = self._prepare(message)
            for worker in message.workers:
                self._start(worker, common, message)
        except CannotStart as problem:
            self.link.send(Problem(str(problem)))
        except OSError as error:
            self.link.send(Problem(_what_is_missing(error, len(message.workers))))

    def _prepare(self, message: Start) -> dict[str, str]:
        """The environment of this host's workers; CannotStart when the command cannot run here."""
        env = {**os.environ, **message.env} if self.remote else dict(message.env)
        bin_folder = str(Path(sys.executable).parent)
        env["PATH"] = os.pathsep.join([bin_folder, env.get("PATH", os.defpath)])
        env.update(machine.thread_variables(env, len(message.workers)))
        store = self._reach_store(message)
        env["ALLSTEP_STORE"] = wire.format_addresses([store])
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.update(_interface_variable(name, message, env))
        env.update(horovod.host_variables(store, env))
        try:
            os.chdir(message.cwd)
        except OSError as error:
            raise CannotStart(
                f"cannot enter the working folder {message.cwd}: {error.strerror}"
            ) from error
        if shutil.which(message.command[0], path=env["PATH"]) is None:
            raise CannotStart(f"command not found: {message.command[0]}")
        return env

    def _reach_store(self, message: Start) -> tuple[str, int]:
        """The store's address as seen from here; the first of those offered that answers."""
        try:
            client = wire.Client(
                list(message.store), message.token, timeout=5.0 if self.remote else 10.0
            )
        except OSError as error:
            raise CannotStart(
                f"cannot reach the launcher: {error}. Is a firewall between the hosts? --iface"
                " names another way"
            ) from error
        found = client.server_address
        client.close()
        return found

    def _start(self, worker: WorkerOrder, common: dict[str, str], message: Start) -> None:
        rank = worker.rank
        to_terminal = rank == message.foreground
        try:
            process = subprocess.Popen(
                message.command,
                env={**common, **worker.env},
                stdin=subprocess.DEVNULL,
                stdout=None if to_terminal else subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise CannotStart(f"cannot start {message.command[0]}: {error.strerror}") from error
        self.workers[rank] = Worker(rank, process, life_of(process.pid))
        self.running.add(rank)
        self.selector.register(
            self.workers[rank].life, selectors.EVENT_READ, lambda: self._exited(rank)
        )
        if process.stdout is not None:
            self.streams.append(_Stream(self, rank, "out", process.stdout.fileno()))
        if process.stderr is not None:
            self.streams.append(_Stream(self, rank, "err", process.stderr.fileno()))
        self.link.send(Started(rank, process.pid))

    def _exited(self, rank: int) -> None:
        """Pass on the last words of a worker and how it ended.

        What it left behind is killed when the run is over.
        """
        worker = self.workers[rank]
        self.selector.unregister(worker.life)
        code = worker.process.wait()
        for stream in self.streams:
            if stream.rank == rank:
                stream.drain()
        self.running.discard(rank)
        self._ended.insert(0, (rank, code))
        # Another worker may have been killed first and still be giving back its memory, while this
        # one has already missed it and
        # failed: the launcher is to learn of both at once, so that it names the right one.
        if not any(self.workers[other].life.is_ending() for other in self.running):
            self._report_ends()

    def _report_ends(self) -> None:
        out_of_memory = machine.oom_kills() > self.oom_kills
        ended, self._ended = self._ended, []
        for rank, code in ended:
            self.link.send(Exit(rank, code, out_of_memory))

    def _clean_up(self) -> None:
        """Kill every process that descends from us; say the last words."""
        end = time.monotonic() + _DYING_SECONDS
        while (children := descendants(os.getpid())) and time.monotonic() < end:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            reap()
            time.sleep(0.01)
        end = time.monotonic() + 2.0
        while self.link.outbox and not self.link.ended and time.monotonic() < end:
            self.link.flush()
            time.sleep(0.01)


class _Stream:
    """What one worker prints on one of its streams.

    It is read while it is `watched`: not while the launcher takes nothing (`pause`), and not after
    its end.
    """

    def __init__(self, agent: Agent, rank: int, name: Literal["out", "err"], fd: int) -> None:
        self.agent, self.rank, self.name, self.fd = agent, rank, name, fd
        self.lines = lines.LineCutter()
        self.ended = False
        self.watched = False
        os.set_blocking(fd, False)
        self.resume()

    def resume(self) -> None:
        """Read it whenever there is something. May be called at any time."""
        if not self.ended and not self.watched:
            self.watched = True
            self.agent.selector.register(self.fd, selectors.EVENT_READ, self.read)

    def pause(self) -> None:
        """Leave what comes in the pipe. May be called at any time."""
        if self.watched:
            self.watched = False
            self.agent.selector.unregister(self.fd)

    def read(self, most: int = 1 << 16) -> int:
        """Pass on what can be read now, at most so many bytes, and return how many there were."""
        try:
            data = os.read(self.fd, most)
        except BlockingIOError:
            return 0
        self._pass_on(self.lines.feed(data) if data else self.lines.end())
        if not data:
            self.pause()
            self.ended = True
        return len(data)

    def drain(self) -> None:
        """Pass on all that a worker that is gone has left in the pipe, also while the stream is
        paused.

        Its children may hold the pipe open and write on, so neither wait for the end of the stream
        nor read more than the pipe holds now.
        """
        left = _bytes_in(self.fd)
        while left > 0 and (count := self.read(left)):
            left -= count
        # Tells whether the stream has ended: a read of a pipe that is empty and open returns at
        # once.
        if not self.ended and not _bytes_in(self.fd):
            self.read()
        self._pass_on(self.lines.end())

    def _pass_on(self, pieces: list[str]) -> None:
        if pieces:
            self.agent.link.send(Lines(self.rank, self.name, tuple(pieces)))


def _bytes_in(pipe: int) -> int:
    """Return how many bytes a pipe holds now."""
    count = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)


def _what_is_missing(error: OSError, num_workers: int) -> str:
    """Return one line about what kept a worker from being started: a limit of this host."""
    advice = ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        enough = max(1024, 4 * num_workers)
        advice = f"; the limit is {soft}, each worker takes 3: raise it with `ulimit -n {enough}`"
    return f"cannot start {num_workers} workers: {error.strerror or error}{advice}"


def _hold_port() -> socket.socket:
    """A port for scripts that must be told one (MASTER_PORT).

    It is bound here and never listened on, so that the kernel gives it to nobody who asks for any
    port; whoever asks for just this one with SO_REUSEADDR, as torch's store does, gets it.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("0.0.0.0", 0))
    return holder


def _interface_variable(name: str, message: Start, env: dict[str, str]) -> dict[str, str]:
    """Which interface Gloo or NCCL shall use: the one asked for, else the one that routes to the
    other hosts."""
    if message.iface:
        return {name: message.iface}
    if name in env:
        return {}
    if not message.peers:
        return {name: "lo"} if name.startswith("GLOO") else {}
    sources = (machine.route_to(address) for address in message.peers)
    interface = next(
        (found for source in sources if source and (found := machine.interface_of(source))), None
    )
    return {name: interface} if interface else {}
