"""The agent: one process per host that starts the host's workers, forwards their output, and kills
the processes that they leave behind.

    launcher --- socket pair --- agent on this host    --- worker, worker
             --- ssh or srun --- agent on another host --- worker, worker

The agent is the parent of the workers, and no process that it started outlives it:

* If the launcher is lost (end of file, or for an agent on another host no message for 0.7 of `lost`
  seconds), the agent kills everything.
* If the agent itself is killed, the kernel kills the workers (PR_SET_PDEATHSIG).
* A worker that was killed is reported as soon as all its tasks are exiting, before the kernel has
  freed its memory (`process.liveness`). It cannot act any more, so a new world may form.
* If a worker leaves processes behind, even in a session of their own, the agent inherits them as
  "subreaper" and kills them.

Each worker leads a session of its own, so that a signal reaches its whole process group, and Ctrl-C
at the terminal reaches only the launcher. Slurm signals the agents (`--srun`), which report that;
the launcher decides what follows.

The messages of both directions are in `messages`.
"""

import contextlib
import errno
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from allstep import faults, framework_threads, machine, wire
from allstep.launch import horovod
from allstep.launch.hosts.addresses import hold_port, interface_variable, own_addresses
from allstep.launch.link import FULL, Link
from allstep.launch.messages import (
    Alive,
    BadMessage,
    Exit,
    Finish,
    Hello,
    Kill,
    KillOne,
    Message,
    Problem,
    Received,
    Signal,
    Start,
    Started,
    WorkerOrder,
)
from allstep.launch.server_processes import start_servers
from allstep.launch.signals import caught_signals
from allstep.launch.signals.witness import Witness
from allstep.launch.worker_stream import WorkerStream
from allstep.limits import read_limits
from allstep.process.deferred_signals import CONFIRM
from allstep.process.family import adopt_orphans, descendants, die_with_parent, reap
from allstep.process.liveness import Life, life_of

# A heartbeat that is late by so much was delayed by the machine, not by the launcher.
_PAUSE_SECONDS = 1.0
# Between two looks at the tasks of the workers, of so many at most: 0.3% of a core.
_LOOK_SECONDS = 0.05
_MAX_LOOKS = 16
# On a busy machine, killed processes need a while to end; the launcher waits for 5 s.
_DYING_SECONDS = 4.0
# In which one signal reaches all processes of a host.
_SIGNALING_SECONDS = 0.05


class CannotStart(Exception):
    """This host cannot start its workers; the text is the reason, in one line."""


class Worker(NamedTuple):
    """A started worker."""

    rank: int
    process: subprocess.Popen[bytes]
    life: Life


class Agent:
    """The agent of one host. Runs until the launcher sends `Finish` or is lost.

    link: to the launcher. host: the name of this host. remote: the launcher is on another host.
    """

    def __init__(self, link: Link, host: str, *, remote: bool) -> None:
        self.link = link
        self.host = host
        self.remote = remote
        # Until the launcher sends its own limits.
        defaults = read_limits({})
        self.lost_seconds, self.beat_seconds = defaults.lost_for_agent, defaults.beat
        self.last_received = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.workers: dict[int, Worker] = {}
        self.running: set[int] = set()
        self.is_elastic = False
        # Rank and exit code of ended workers that have not been reported.
        self._ended: list[tuple[int, int]] = []
        # Time of the next look, and how many workers the looks before it have covered.
        self._look_at, self._num_looks = 0.0, 0
        self.done = False
        self.port_holder = hold_port()
        self.oom_kills = machine.oom_kills()
        self.streams: list[WorkerStream] = []
        self.witness: Witness | None = None
        self._full = False
        self._room: int | None = None

    def run(self) -> None:
        """Serve the launcher until `Finish` or its end; then kill all descendants."""
        adopt_orphans()
        self.witness = Witness()
        self.selector.register(self.link.read_fd, selectors.EVENT_READ, self._receive)
        with caught_signals(os.environ) as signals:
            self.selector.register(
                signals, selectors.EVENT_READ, lambda: self._report_signals(signals.recv(64))
            )
            self._send_hello()
            self._serve()

    def _serve(self) -> None:
        next_beat = time.monotonic() + self.beat_seconds
        try:
            while not self.done and not self.link.ended:
                self._wait_for_room()
                due = min(next_beat, self._look_at) if self.running else next_beat
                for key, _ in self.selector.select(max(0.0, due - time.monotonic())):
                    key.data()
                if (now := time.monotonic()) >= self._look_at:
                    self._look_at = now + _LOOK_SECONDS
                    self._look()
                if now >= next_beat:
                    self._excuse_pause(now, now - next_beat)
                    next_beat = now + self.beat_seconds
                    self._beat()
                self.link.flush()
                self._apply_backpressure()
        finally:
            self._clean_up()

    def _send_hello(self) -> None:
        launcher_address, address = own_addresses(os.environ) if self.remote else (None, None)
        port = self.port_holder.getsockname()[1]
        self.link.send(Hello(port, machine.interfaces(), launcher_address, address))

    def _excuse_pause(self, now: float, late: float) -> None:
        """Do not count time in which this process did not run as silence of the launcher.

        It was stopped, or the machine suspended. In an elastic run the time counts: the launcher
        may have formed a world without this host.
        """
        if late > _PAUSE_SECONDS and not self.is_elastic:
            self.last_received = min(now, self.last_received + late)

    def _beat(self) -> None:
        """Send a sign of life; end if the launcher has been silent for too long."""
        if not self.link.outbox:
            self.link.send(Alive())
        if self.remote and time.monotonic() - self.last_received > self.lost_seconds:
            # On standard error, which reaches the launcher separately if it is back.
            silence = time.monotonic() - self.last_received
            print(
                f"no sign of life from the launcher for {silence:.0f} s: the agent ended its"
                " workers",
                file=sys.stderr,
            )
            self.link.ended = True

    def _wait_for_room(self) -> None:
        """Wake the selector when the link can take more, while the outbox is not empty."""
        waits = bool(self.link.outbox)
        if waits and self._room is None:
            # A duplicate descriptor, since both directions of the link may be one socket.
            self._room = os.dup(self.link.write_fd)
            self.selector.register(self._room, selectors.EVENT_WRITE, self.link.flush)
        elif not waits and self._room is not None:
            self.selector.unregister(self._room)
            os.close(self._room)
            self._room = None

    def _apply_backpressure(self) -> None:
        """Stop reading from the workers while the launcher does not read; the workers then wait."""
        full = len(self.link.outbox) > FULL
        if full != self._full:
            self._full = full
            for stream in self.streams:
                stream.pause() if full else stream.resume()

    def _receive(self) -> None:
        try:
            for message in self.link.receive():
                self.last_received = time.monotonic()
                self._take(message)
        except BadMessage as bad:
            # The agent ends: a launcher that it does not understand may not be able to end it.
            self.link.send(Problem(bad.described("the launcher")))
            self.done = True

    def _take(self, message: Message) -> None:
        """Carry out a message of the launcher."""
        match message:
            case Start():
                self._on_start(message)
            case Signal():
                self._deliver(message)
            case Kill():
                self._signal(signal.SIGKILL)
            case KillOne():
                self._signal_one(message.rank, signal.SIGKILL)
            case Finish():
                self.done = True

    def _report_signals(self, numbers: bytes) -> None:
        """Report signals to this process."""
        for number in numbers:
            if number != signal.SIGCHLD:
                self.link.send(Received(number))

    def _deliver(self, message: Signal) -> None:
        """Send a signal of the launcher to the workers, unless they have received it already."""
        # Slurm signals one process after the other, the launcher maybe before the workers.
        time.sleep(_SIGNALING_SECONDS)
        if self.witness is None or not self.witness.has_received(message.number):
            self._signal(message.number)
        if message.confirms:
            self._signal(CONFIRM)

    def _signal(self, number: int) -> None:
        """Send a signal to the process group of every running worker."""
        for rank in self.running:
            self._signal_one(rank, number)

    def _signal_one(self, rank: int, number: int) -> None:
        """Send a signal to the process group of a worker, if it was started."""
        if rank in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.workers[rank].process.pid, number)

    def _on_start(self, message: Start) -> None:
        """Start the workers; send a `Problem` if that fails."""
        self.lost_seconds, self.beat_seconds = message.lost, message.beat
        self.is_elastic = message.is_elastic
        try:
            common = self._prepare(message)
            start_servers(message.servers, common)
            for worker in message.workers:
                self._start(worker, common, message)
        except CannotStart as problem:
            self.link.send(Problem(str(problem)))
        except OSError as error:
            self.link.send(Problem(machine.why_no_start(error, len(message.workers))))

    def _prepare(self, message: Start) -> dict[str, str]:
        """Return the environment of this host's workers; CannotStart if the command cannot run."""
        env = {**os.environ, **message.env} if self.remote else dict(message.env)
        bin_folder = str(Path(sys.executable).parent)
        env["PATH"] = os.pathsep.join([bin_folder, env.get("PATH", os.defpath)])
        env.update(machine.thread_variables(env, max(1, message.num_sharing)))
        env.update(framework_threads.of_worker(env))
        store = self._reach_store(message)
        env["ALLSTEP_STORE"] = wire.format_addresses([store])
        env[faults.AGENT] = str(os.getpid())
        # The ranks of an elastic run choose it in each world: hosts may join later.
        peers = None if message.is_elastic else message.peers
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.update(interface_variable(name, message.iface, peers, env))
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
        """Return the first of the store's addresses that answers from this host."""
        try:
            return wire.find_address(
                message.store, message.token, timeout=5.0 if self.remote else 10.0
            )
        except OSError as error:
            raise CannotStart(
                f"cannot reach the launcher: {error}; check for a firewall between the hosts, or"
                " set another interface with --iface"
            ) from error

    def _start(self, worker: WorkerOrder, common: dict[str, str], message: Start) -> None:
        """Start one worker with the environment `common` and its own variables."""
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
            self.streams.append(WorkerStream(self.selector, self.link, rank, "out", process.stdout))
        if process.stderr is not None:
            self.streams.append(WorkerStream(self.selector, self.link, rank, "err", process.stderr))
        self.link.send(Started(rank, process.pid))

    def _exited(self, rank: int) -> None:
        """Report a worker whose process is gone, unless that was done while it was ending.

        Processes that it left behind are killed at the end of the run, or now in an elastic one.
        """
        worker = self.workers[rank]
        self.selector.unregister(worker.life)
        code = worker.process.wait()
        if rank in self.running:
            self._record_end(rank, code)
            self._report_all_ends()
        # In an elastic run others follow: their descriptors must not add up.
        del self.workers[rank]
        self.streams = [stream for stream in self.streams if not stream.ended]

    def _look(self) -> None:
        """Report workers that are ending although the kernel still frees their memory."""
        ranks = sorted(self.running)
        for _ in range(min(_MAX_LOOKS, len(ranks))):
            self._num_looks += 1
            rank = ranks[self._num_looks % len(ranks)]
            if code := self.workers[rank].life.ending_code():
                self._record_end(rank, code)
                self._report_all_ends()
                return

    def _record_end(self, rank: int, code: int) -> None:
        if self.is_elastic:
            self._signal_one(rank, signal.SIGKILL)
        for stream in self.streams:
            if stream.rank == rank:
                stream.drain()
        self.running.discard(rank)
        self._ended.insert(0, (rank, code))

    def _report_all_ends(self) -> None:
        """Report the ended workers, and before them those that are ending.

        A worker may have been killed first and still be freeing its memory, while another one has
        already failed because of it. The launcher must learn of both at once, so that it reports
        the right one.
        """
        ending = [rank for rank in self.running if self.workers[rank].life.is_ending()]
        for rank in ending:
            if code := self.workers[rank].life.ending_code():
                self._record_end(rank, code)
        # Those without a known code are waited for.
        if not any(rank in self.running for rank in ending):
            self._report_ends()

    def _report_ends(self) -> None:
        """Send an `Exit` for each ended worker that has not been reported."""
        out_of_memory = machine.oom_kills() > self.oom_kills
        ended, self._ended = self._ended, []
        for rank, code in ended:
            self.link.send(Exit(rank, code, out_of_memory))

    def _clean_up(self) -> None:
        """Kill all descendants; then send what is left in the outbox, for 2 s at most."""
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
