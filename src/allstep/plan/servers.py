"""The time of a step with parameter servers: one queue per server and direction.

A tensor goes to the least loaded server, in layer order. It is pushed when its gradient is ready,
and its server is busy with it for as long as its link needs for the pushes of all parties. The
update follows the last push. A layer's forward pass waits for its weights, which are pulled in
forward order. The link of a host carries the tensor once for each party on it, which is the limit
where parties are many on a host.
"""

from collections.abc import Sequence

from allstep.plan.setting import Cluster, Gradient, Profile, Servers


def exposed_by_servers(slowest: Profile, cluster: Cluster, servers: Servers) -> float:
    """Return the seconds of a step in which the slowest worker waits for servers."""
    parts = _parts(slowest.gradients, servers, cluster)
    parties = cluster.hosts if servers.sum_in_host else cluster.size
    on_host = 1 if servers.sum_in_host else cluster.per_host
    inside = 0.0
    if servers.sum_in_host and cluster.per_host > 1:
        share = 2 * (cluster.per_host - 1) / cluster.per_host
        inside = share / cluster.inside.bandwidth

    def seconds(nbytes: float) -> float:
        """Return how long a server is busy with the pushes, or the pulls, of all parties."""
        carried = max(parties, on_host) * nbytes
        return carried / cluster.link.bandwidth + cluster.link.latency

    free: dict[int, float] = {}
    pushed: list[float] = [0.0] * len(slowest.gradients)
    # Pushes, in the order of the backward pass.
    for index in reversed(range(len(slowest.gradients))):
        gradient = slowest.gradients[index]
        ready = gradient.ready + inside * gradient.nbytes / 2
        for server, nbytes in parts[index]:
            free[server] = max(free.get(server, 0.0), ready) + seconds(nbytes)
            pushed[index] = max(pushed[index], free[server])
    # Pulls of the next step, in forward order; its clock starts at the end of the backward pass.
    end = slowest.forward + slowest.backward
    out: dict[int, float] = {}
    late = 0.0
    for index, gradient in enumerate(slowest.gradients):
        arrived = 0.0
        for server, nbytes in parts[index]:
            out[server] = max(out.get(server, 0.0), pushed[index]) + seconds(nbytes)
            arrived = max(arrived, out[server])
        arrived += inside * gradient.nbytes / 2
        late = max(late, arrived - (end + gradient.needed))
    return late


def _parts(
    gradients: Sequence[Gradient], servers: Servers, cluster: Cluster
) -> list[list[tuple[int, float]]]:
    """Return for each gradient the servers that have it, with the bytes of each."""
    count = servers.count or cluster.hosts
    if servers.split:
        return [[(server, each.nbytes / count) for server in range(count)] for each in gradients]
    load = [0.0] * count
    parts = []
    for each in gradients:
        server = min(range(count), key=lambda place: (load[place], place))
        load[server] += each.nbytes
        parts.append([(server, each.nbytes)])
    return parts
