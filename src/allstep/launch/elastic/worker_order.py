"""The message that starts one worker of an elastic run."""

from dataclasses import replace

from allstep.launch.elastic.worker_table import ElasticWorker
from allstep.launch.host_connection import HostConnection
from allstep.launch.messages import Start, WorkerOrder
from allstep.launch.orders import Orders
from allstep.launch.roster import Policy
from allstep.wire import keys
from allstep.wire.tickets import PROCESS
from allstep.world import World


def worker_order(
    orders: Orders,
    connection: HostConnection,
    worker: ElasticWorker,
    policy: Policy,
    *,
    joins: bool,
) -> Start:
    """Return the message that starts a worker; ConfigError without an address of a host.

    joins: it is started for a later world.
    """
    size = policy.num_workers
    # Until it has a place: scripts may read these variables before they call init().
    rank, local_size = min(worker.number, size - 1), min(connection.host.slots, size)
    place = rank, size, min(worker.slot, rank, local_size - 1), local_size, 0, 1
    world = World(*place, connection.label, "allstep")
    env = {
        **world.to_env(),
        **world.to_horovod_env(),
        keys.TICKET: worker.ticket,
        keys.WORKER: str(worker.number),
        # The launcher may itself be a process of a worker of another run.
        PROCESS: "",
        "HOROVOD_ELASTIC": "1",
    }
    if policy.replaces:
        most = orders.job.max_workers or policy.most_ranks
        env[keys.SIZES] = f"{policy.min_workers}:{most}"
    if joins:
        env[keys.JOINS] = "1"
    started = [WorkerOrder(worker.number, env)]
    order = orders.order(connection, orders.addresses(), started, is_elastic=True)
    # Any worker may become rank 0 and then writes to the terminal.
    return order if order.foreground is None else replace(order, foreground=worker.number)
