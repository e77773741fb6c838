"""The launcher of an elastic run: `Launcher` with a roster in place of a fixed list of ranks.

```
worker  -- elastic/ask ------->  store  -- subscription -->  Standby, Ready  -->  roster
agent   -- Exit, end of link ----------------------------->  WorkerExited, HostLost  --^
script  -- host_poll ------------------------------------->  HostsFound  --------------^
roster  -- Publish, Dismiss  -->  elastic/place/<ticket>/<n>
        -- EndGeneration     -->  elastic/end/<generation>
        -- StartWorker, KillWorker, ForwardSignal  -->  messages to agents
```

A worker has a number, which counts all workers of the run, and a ticket. Its rank belongs to one
generation: lines that it prints have the rank of its current place in front. A worker on a host
without an agent waits until its agent was started (`host_agents`).
"""

import selectors
from collections.abc import Iterable, Sequence
from typing import Any

from allstep.errors import ConfigError
from allstep.launch import cause
from allstep.launch.elastic.change_line import change_line, too_few_line
from allstep.launch.elastic.elastic_run import ElasticRun
from allstep.launch.elastic.fault_ranks import FaultRanks
from allstep.launch.elastic.host_agents import HostAgents
from allstep.launch.elastic.host_poll import FoundHosts, HostPoll
from allstep.launch.elastic.loss_lines import LossLines
from allstep.launch.elastic.worker_keys import WorkerKeys
from allstep.launch.elastic.worker_order import worker_order
from allstep.launch.elastic.worker_table import ElasticWorker, WorkerTable
from allstep.launch.host_connection import HostConnection, open_connections
from allstep.launch.hosts.discovery import Discovery
from allstep.launch.job import Job
from allstep.launch.launcher import Launcher
from allstep.launch.messages import (
    Exit,
    Hello,
    KillOne,
    Message,
    Problem,
    Signal,
    Start,
    Started,
)
from allstep.launch.orders import Orders
from allstep.launch.roster.actions import (
    Dismiss,
    EndGeneration,
    ForwardSignal,
    KillWorker,
    NotifyChange,
    Plan,
    Publish,
    ReportLoss,
    SaveAndExit,
    StartWorker,
)
from allstep.launch.roster.elastic_policy import Policy
from allstep.launch.roster.elastic_state import Stage
from allstep.launch.roster.roster_events import Progress, StartFailed
from allstep.launch.run_events import Exited, LeaveHost, Refused
from allstep.launch.run_state import RESUBMIT, HostRanks
from allstep.wire import keys
from allstep.wire.subscription import Subscription


class ElasticLauncher(Launcher):
    """One elastic run of a `job`.

    policy: how many workers it needs, and what follows a loss. discovery: the script that is asked
    for hosts while the run lasts; the hosts of the job are those of its first poll. None (default):
    they are fixed.
    """

    def __init__(self, job: Job, policy: Policy, discovery: Discovery | None = None) -> None:
        self.policy = policy
        self._discovery = discovery
        self._poll: HostPoll | None = None
        self._printed_problems: dict[str, str] = {}
        self.workers = WorkerTable()
        self._asks: Subscription | None = None
        self._keys: WorkerKeys
        self._fault_ranks = FaultRanks(self.workers)
        self._losses = LossLines(lambda line: self.output.notify(line))
        # Requests to leave the current generation in order.
        self._num_changes = 0
        # The last one of which too few workers were left.
        self._reported: Plan | None = None
        super().__init__(job)
        self.tickets = self.workers.tickets
        self.output.shown = self.workers.shown
        self.fault_ranks = self._fault_ranks.of

    def watch(self, connections: Sequence[HostConnection]) -> None:
        """Use these connections as the hosts of the run."""
        here = frozenset(each.label for each in connections if not each.remote)
        found = FoundHosts(tuple(self.job.hosts), here)
        if self._discovery is not None:
            found = FoundHosts.of(self.job.hosts)
        self.agents = HostAgents(found, connections, self.job, self.selector)
        self.connections = self.agents.connections
        for connection in connections:
            connection.ranks = []
        hosts = [HostRanks(each.label, [], each.remote) for each in connections]
        finds_hosts = self._discovery is not None
        self.run_state = ElasticRun(hosts, self.policy, self.limits.lost, finds_hosts=finds_hosts)
        self.run_state.may_act = self._may_act
        self.state = self.run_state

    def _open_connections(self) -> Sequence[HostConnection]:
        """Start an agent on every host of a fixed list; on found hosts when a worker needs one."""
        found = self._discovery is not None
        return [] if found else open_connections(self.job)

    def _bind_address(self) -> str:
        # Hosts that are found later may be other machines.
        return super()._bind_address() if self._discovery is None else ""

    # Hosts.

    def _on_hosts(self) -> None:
        """Offer the hosts that the script has listed; warn if it has failed."""
        assert self._poll is not None
        found = self._poll.take()
        if isinstance(found, str):
            self.output.notify(f"allstep run: warning: {found}; the last list of hosts counts")
            return
        self.output.notify(f"allstep run: hosts: {self.agents.list_hosts(found)}")
        self.run_state.offer(self.agents.slots, self._moment())

    def _agent_on(self, label: str) -> HostConnection:
        """Return the connection to the agent of a host; start it if there is none."""
        if (living := self.agents.living(label)) is not None:
            return living
        number, connection = self.agents.open(label, self._moment())
        host = HostRanks(connection.label, [], connection.remote)
        self.run_state.add_host(host, self._moment())
        self._listen_to(number, connection)
        return connection

    def _leave(self, connection: HostConnection, *, lost: bool) -> None:
        super()._leave(connection, lost=lost)
        self.agents.close(connection)

    def _print_problem(self, host: str, text: str) -> None:
        """Print why workers cannot be started on a host, once until another reason occurs."""
        if self._printed_problems.get(host) != text:
            self._printed_problems[host] = text
            self.output.notify(f"allstep run: no worker can start on {host}: {text}")

    def _end_agents(self) -> None:
        if self._poll is not None:
            self.selector.unregister(self._poll)
            self._poll.close()
        self.agents.close_ended()
        super()._end_agents()
        self._losses.print_kept()

    # Workers.

    def _start_workers(self) -> None:
        """Offer the slots of all hosts; the roster's actions start the workers."""
        assert self.store is not None
        self._keys = WorkerKeys(self.store)
        self._asks = self.store.subscribe(keys.ASKS)
        self.selector.register(self._asks, selectors.EVENT_READ, self._on_asks)
        self.run_state.start()
        self.run_state.offer(self.agents.slots, self._moment())
        if self._discovery is not None:
            self._poll = HostPoll(self._discovery, self.agents.found)
            self.selector.register(self._poll, selectors.EVENT_READ, self._on_hosts)
        self._decide()

    def _on_asks(self) -> None:
        """Pass the workers' requests for a place on to the roster."""
        assert self._asks is not None and self.store is not None
        for key in self._asks.take():
            event = self.workers.asked(key, self.store.peek(key) or b"", self._moment())
            if event is not None:
                self.run_state.report(event)
            elif self.workers.is_living(key):
                self._keys.refuse(key)
            else:
                self._keys.forget_request(key)

    def _decide(self) -> None:
        self._read_progress()
        for number in self.agents.late(self._moment(), self.limits.start):
            late = [self.connections[number]]
            self.run_state.take(Refused(self._moment(), number, self._late_text(late)))
        super()._decide()
        self.agents.release_unlisted({worker.host for worker in self.workers.living()})

    def _read_progress(self) -> None:
        """Pass on what the workers have written about their steps since the last time."""
        for worker in self.workers.living():
            value = self._keys.new_progress(worker)
            if value is not None and (found := self.workers.progress(value)) is not None:
                self.run_state.report(Progress(self._moment(), worker.number, *found))

    def _take(self, host: int, connection: HostConnection, message: Message) -> None:
        if isinstance(message, Problem) and self.run_state.may_go_without_a_host:
            for worker in self.workers.living_on(connection.label):
                if not worker.has_started:
                    self._cannot_start(worker, message.text)
            return
        super()._take(host, connection, message)
        if isinstance(message, Hello):
            self._printed_problems.pop(connection.label, None)
            for worker in self.workers.living_on(connection.label):
                self._send_order(connection, worker)
        elif isinstance(message, Started):
            self.workers[message.rank].has_started = True

    def _exited(self, now: float, message: Exit) -> Exited:
        """Return the event of an exit; the ticket of the worker is not valid any more."""
        assert self.store is not None
        # What it has reported comes before its exit.
        self._read_progress()
        worker = self._end_worker(message.rank)
        for connection in self.connections:
            connection.groups.pop(message.rank, None)
        record = None
        if message.code and worker.rank is not None:
            record = self.store.peek(keys.failure_of(worker.rank))
        errors = tuple(self.output.errors[message.rank])
        blames = cause.blamed_by(record)
        return Exited(now, message.rank, message.code, errors, message.out_of_memory, blames)

    def _end_worker(self, number: int) -> ElasticWorker:
        """Revoke the ticket of a worker that has ended, delete its keys, and return it."""
        worker = self.workers.end(number)
        self._keys.forget(worker)
        return worker

    # Actions.

    def _carry_out(self, decisions: Iterable[object]) -> None:
        for decision in decisions:
            match decision:
                case StartWorker():
                    self._start_worker(decision)
                case KillWorker():
                    self._kill_worker(self.workers[decision.worker])
                case Publish():
                    self._publish(decision.plan)
                case EndGeneration():
                    self._end_generation(decision)
                case NotifyChange():
                    self._notify_change(decision)
                case ReportLoss():
                    plan = self.run_state.roster.plan
                    prints = plan is not None and self._worker_prints(plan)
                    self._losses.add(decision.text, worker_prints=prints)
                case Dismiss():
                    self._answer(decision.worker, dismissed="it is not needed any more", code=0)
                case SaveAndExit():
                    self._let_save(decision)
                case ForwardSignal():
                    self._send(Signal(decision.number, confirms=True))
                case LeaveHost():
                    connection = self.connections[decision.host]
                    for worker in self.workers.living_on(connection.label):
                        self._end_worker(worker.number)
                    if connection.hello is None:
                        self._print_problem(connection.label, decision.why)
                    super()._carry_out([decision])
                case _:
                    super()._carry_out([decision])
        self._report_too_few()

    def _may_act(self, host: str) -> bool:
        """Return whether a worker of another host may still act: it is connected to the store."""
        if self.store is None or not any(each.label == host for each in self._remotes()):
            return False
        return any(
            self.store.is_connected(keys.worker_of(each.ticket))
            for each in self.workers.living_on(host)
        )

    def _start_worker(self, action: StartWorker) -> None:
        worker = self.workers.add(action.worker, action.host, action.slot)
        try:
            connection = self._agent_on(action.host)
        except (ConfigError, OSError) as error:
            self._cannot_start(worker, str(error))
            return
        assert isinstance(connection.ranks, list)
        connection.ranks.append(worker.number)
        if connection.hello is not None:
            self._send_order(connection, worker)

    def _cannot_start(self, worker: ElasticWorker, why: str) -> None:
        self._end_worker(worker.number)
        self._print_problem(worker.host, why)
        self.run_state.report(StartFailed(self._moment(), worker.number, why))

    def _kill_worker(self, worker: ElasticWorker) -> None:
        connection = self.agents.living(worker.host)
        if worker.is_ordered and connection is not None:
            connection.link.send(KillOne(worker.number))
        else:
            # It has no process, and will have none.
            self._end_worker(worker.number)
            why = "its agent was not ready in time"
            self.run_state.report(StartFailed(self._moment(), worker.number, why))

    def _send_order(self, connection: HostConnection, worker: ElasticWorker) -> None:
        """Send the order to start a worker to its agent, once."""
        if worker.is_ordered:
            return
        try:
            connection.link.send(self._order(connection, worker))
            worker.is_ordered = True
        except ConfigError as error:
            self._cannot_start(worker, str(error))

    def _order(self, connection: HostConnection, worker: ElasticWorker) -> Start:
        """Return the message that starts one worker; ConfigError without an address of a host."""
        assert self.store is not None
        usable = [each for each in self.connections if each.hello is not None and not each.over]
        orders = Orders(self.job, [], usable, self.token, self.store.port, self.limits)
        # Spares, too, prepare everything before they wait.
        has_begun = self.run_state.roster.plan is not None
        joins = has_begun or worker.number >= self.policy.num_workers
        return worker_order(orders, connection, worker, self.policy, joins=joins)

    def _publish(self, plan: Plan) -> None:
        """Send each member its place, and forget the keys of the generation before."""
        assert self.store is not None
        self.store.delete_prefix(f"allstep/{plan.generation}/")
        self.store.delete_prefix(keys.change_of(plan.generation - 1, 0).removesuffix("0"))
        self._num_changes = 0
        self.store.delete_prefix(keys.failure_of(0).removesuffix("0"))
        cards = [self.workers[number].card for number in plan.members]
        ranks = {number: rank for rank, number in enumerate(plan.members)}
        for number, rank in ranks.items():
            worker = self.workers[number]
            worker.rank, worker.generation = rank, plan.generation
            self._answer(
                number,
                generation=plan.generation,
                rank=rank,
                cards=cards,
                source=None if plan.source is None else ranks[plan.source],
                new=[ranks[each] for each in plan.new],
                behind=[ranks[each] for each in plan.behind],
                reason=plan.reason,
                faults=self._fault_ranks.at_first_place(number, self.store, self._moment()),
            )
        self._losses.drop_kept()
        if plan.generation and not self._worker_prints(plan):
            hosts = [self.workers[each].host for each in plan.members]
            self.output.notify(change_line(plan, hosts))

    def _worker_prints(self, plan: Plan) -> bool:
        """Return whether `allstep train` prints a line about a change, after its first step."""
        prints = self.workers[plan.members[0]].card.get("prints_changes")
        return self.job.foreground or bool(prints and self.output.shows(plan.members[0]))

    def _answer(self, number: int, **reply: Any) -> None:
        """Answer the request of a worker for a place."""
        self._keys.answer(self.workers[number], reply)

    def _let_save(self, action: SaveAndExit) -> None:
        why = "the run stops" + ("; it saves the state" if action.saves else "")
        generation = self.workers[action.worker].generation
        num_left = 0 if generation is None else self.workers.num_left(generation)
        reply = {"dismissed": why, "code": RESUBMIT, "saves": action.saves, "num_left": num_left}
        self._answer(action.worker, **reply)

    def _end_generation(self, action: EndGeneration) -> None:
        assert self.store is not None
        self.store.delete_prefix(keys.end_of(action.generation - 1))
        self.store.set(keys.end_of(action.generation), action.reason.encode())

    def _report_too_few(self) -> None:
        """Print once for a generation that too few workers are left, as soon as that is known.

        A survivor may report the loss before the exit of the lost worker is known.
        """
        roster = self.run_state.roster
        if roster.stage is Stage.ENDED and roster.plan != self._reported:
            assert roster.plan is not None
            left = self.workers.num_left(roster.plan.generation)
            if left < self.policy.min_workers:
                self._reported = roster.plan
                self.output.notify(too_few_line(roster.reason, left, self.policy))

    def _notify_change(self, action: NotifyChange) -> None:
        assert self.store is not None
        self.store.set(keys.change_of(action.generation, self._num_changes), action.kind.encode())
        self._num_changes += 1
