"""The line of the banner about a mode that is not plain allreduce: who waits for whom.

It has one sentence about waiting, then the parties or servers with their bytes, and the learning
rate of a push (D18).
"""

from allstep.console.quantities import nbytes
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.watch.events import Opening


def sync_line(
    config: ResolvedConfig, num_parties: int, servers: str = "", num_hosts: int = 1
) -> str:
    """Return what `sync` of a run means, with its number of parties. servers: `servers_text`."""
    parties = f"{num_parties} part{'y' if num_parties == 1 else 'ies'}"
    text = f"{config.sync.name}: {_waiting(config, num_parties, num_hosts)}"
    if config.sync.mode.has_equal_steps:
        return f"{text}; {servers}" if servers else text
    if config.sync.mode.name == "elastic":
        return f"{text}; {parties}; {_factor(config, num_parties)}"
    return f"{text}; {parties} push {_share(config, num_parties)}; {_rate(config, num_parties)}"


def servers_text(opening: Opening) -> str:
    """Return who serves how many bytes of the weights; "" where no worker owns a part of them."""
    if opening.config.sync.mode.name != "server" or not opening.num_owners:
        return ""
    each = nbytes(opening.nbytes / opening.num_owners)
    workers = f"{opening.num_owners} worker{'' if opening.num_owners == 1 else 's'}"
    num_hosts = len(set(opening.hosts))
    where = ""
    if num_hosts > 1:
        where = " on each host" if opening.undo_nbytes else f" on {num_hosts} hosts"
    return f"{workers}{where} serve {each} each"


def _waiting(config: ResolvedConfig, num_parties: int, num_hosts: int) -> str:
    """Return which party waits for which."""
    mode = config.sync.mode
    number = mode.number
    waiting = {
        "server": "every worker waits for all others at every step, and the owner of a slice sums"
        " and updates it",
        "async": "no worker waits for another one",
        "stale": f"a worker waits before a push that would make another's gradient older than"
        f" {_rounds(number)}, which is {number * num_parties} pushes",
        "clock": f"a worker waits while it is more than {_steps(number)} ahead of the slowest",
        "elastic": f"no worker waits for another one; after {_steps(number)} of its own a worker"
        " and the center move toward each other",
        "lazy": f"no worker waits for another one, and each pushes the sum of {_steps(number)}",
    }
    if mode.name in ("local", "diloco"):
        return _averages(config, num_hosts)
    return waiting.get(mode.name, "the workers wait for each other at intervals")


def _averages(config: ResolvedConfig, num_hosts: int) -> str:
    """Return the sentence of a mode that averages weights."""
    mode = config.sync.mode
    if config.sync.are_hosts(num_hosts):
        text = (
            f"each of {num_hosts} hosts trains alone for {_steps(mode.number)}, whose workers wait"
            " for each other at every step; then all wait for each other and take the mean of"
            " their weights"
        )
    else:
        text = (
            f"every worker trains alone for {_steps(mode.number)} on its share of each batch, then"
            " all wait for each other and take the mean of their weights"
        )
    if mode.name == "diloco":
        text += ", with an outer Nesterov step"
    if mode.from_epoch:
        text += f"; before epoch {mode.from_epoch} they wait for each other at every step"
    return text


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _rounds(number: int) -> str:
    return f"{number} round{'' if number == 1 else 's'}"


def samples_of_push(config: ResolvedConfig, num_parties: int) -> int:
    """Return the samples of a push of the usual size."""
    steps = config.sync.mode.number if config.sync.mode.name == "lazy" else 1
    return max(1, config.batch // num_parties) * steps


def _share(config: ResolvedConfig, num_parties: int) -> str:
    samples = samples_of_push(config, num_parties)
    return f"{samples} sample{'' if samples == 1 else 's'} each"


def _factor(config: ResolvedConfig, num_parties: int) -> str:
    """Return how far a party and the center of `elastic:H` move."""
    alpha = config.sync.alpha
    text = f"0.9/{num_parties}" if alpha is None else f"{alpha:g}"
    return f"each moves {text} of the distance; a step has {_samples(config, num_parties)}"


def _samples(config: ResolvedConfig, num_parties: int) -> str:
    samples = max(1, config.batch // num_parties)
    return f"{samples} sample{'' if samples == 1 else 's'} and the learning rate lr"


def _rate(config: ResolvedConfig, num_parties: int) -> str:
    if config.sync.scale:
        text = (
            f"learning rate of a push: lr x {samples_of_push(config, num_parties)}/{config.batch}"
        )
    else:
        text = "learning rate of a push: lr (sync.scale=false)"
    if config.sync.correct == "lr":
        return f"{text}, divided by the staleness"
    if config.sync.correct == "delay":
        return f"{text}, gradients corrected for their delay"
    return text
