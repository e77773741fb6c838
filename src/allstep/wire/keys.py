"""Keys of the store that launcher and ranks share: one side writes them, the other reads them.

===============================  ========  ======================================================
key                              writer    value
===============================  ========  ======================================================
`allstep/hosts`                  launcher  JSON: the host of each rank
`allstep/failure/<rank>`         rank      JSON: the first failure of the rank
                                           (`comm.health.failure`): `kind`, `reason`, `peer` (the
                                           rank it blames, also itself)
`allstep/faults`                 ranks     number of injected faults that have occurred (a
                                           counter)
`allstep/faults/given`           ranks     JSON: list of the faults of the workers' own command
                                           lines, which the launcher does not know
`allstep/fault/<n>`              rank      JSON: the n-th injected fault, from 1
                                           (`faults.reports`): `fault`, `rank`, `text`
`elastic/ask/<worker>/<n>`       worker    JSON: it waits for its n-th place. `card`: host, pid,
                                           cores, addresses. `generation`: the one that it left,
                                           or null. `updates`: how many it has applied
`elastic/place/<worker>/<n>`     launcher  JSON: its n-th place: `generation`, `rank`, `cards` of
                                           all ranks, `source`, `new`, `behind`, `reason`,
                                           `faults` (`faults.elastic`, in its first place); or
                                           `dismissed`: why it has none, `code`: its exit code,
                                           and `saves`: whether it saves its state first
`elastic/end/<generation>`       launcher  text: why the generation has ended
`elastic/change/<gen.>/<n>`      launcher  text: "grow", "shrink" or "mixed": the members should
                                           leave the generation after their step; the n-th time
`elastic/progress/<w.>/steps`    worker    JSON: the generation, and how many updates it has
                                           applied
===============================  ========  ======================================================

In an elastic run (D14) a worker has a ticket from the launcher, which it keeps while its rank
changes. `<worker>` is the public part of the ticket (`worker_of`); clients write only the keys
below it, and read all (`tickets`).
"""

HOSTS = "allstep/hosts"
FAULTS = "allstep/faults"
FAULTS_GIVEN = "allstep/faults/given"
ASKS = "elastic/ask/"
"""Prefix of the keys of `ask_of`."""
TICKET = "ALLSTEP_TICKET"
"""Environment variable with the ticket of a worker."""
WORKER = "ALLSTEP_WORKER"
"""Environment variable with the number of a worker, which counts all workers of an elastic run."""
SIZES = "ALLSTEP_ELASTIC_SIZES"
"""Environment variable with the least and the largest number of ranks that a world of an elastic
run may have, such as `2:8`. A script need not fit all of them; `allstep train` must."""
JOINS = "ALLSTEP_JOINS"
"""Environment variable that is set for a worker that joins a run whose first world has formed."""


def failure_of(rank: int) -> str:
    """Return the key of a rank's failure record."""
    return f"allstep/failure/{rank}"


def fault_record(number: int | str) -> str:
    """Return the key of the record of an injected fault.

    number: its place, from 1; "" for the beginning of all these keys.
    """
    return f"allstep/fault/{number}"


def worker_of(ticket: str) -> str:
    """Return the public part of a ticket, `<worker>-<secret>`, or the whole without a secret."""
    return ticket.partition("-")[0]


def ask_of(ticket: str, number: int) -> str:
    """Return the key under which a worker asks for its place, the first time with number 0."""
    return f"{ASKS}{worker_of(ticket)}/{number}"


def place_of(ticket: str, number: int) -> str:
    """Return the key of the answer to `ask_of`."""
    return f"elastic/place/{worker_of(ticket)}/{number}"


def end_of(generation: int) -> str:
    """Return the key of the notice that a generation has ended."""
    return f"elastic/end/{generation}"


def change_of(generation: int, number: int) -> str:
    """Return the key of a request to leave a generation in order, the first one with number 0."""
    return f"elastic/change/{generation}/{number}"


def progress_of(ticket: str) -> str:
    """Return the key under which a worker reports its steps."""
    return f"elastic/progress/{worker_of(ticket)}/steps"


def all_of(ticket: str) -> tuple[str, ...]:
    """Return the prefixes of all keys of a worker: its requests, the answers, its progress."""
    return tuple(f"elastic/{what}/{worker_of(ticket)}/" for what in ("ask", "place", "progress"))
