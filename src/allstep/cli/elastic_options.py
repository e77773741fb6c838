"""The options of an elastic `allstep train`: `--min-workers` switches it on, or the sync mode."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allstep.errors import ConfigError
from allstep.wire.keys import TICKET

if TYPE_CHECKING:
    from allstep.launch import Policy
    from allstep.train.config.run_config import RunConfig

_TIMEOUT = 600.0


@dataclass(frozen=True)
class ElasticOptions:
    """What the user gave; None for an option that was not given."""

    min_workers: int | None
    max_workers: int | None
    spares: int | None
    timeout: float | None
    max_failures: int | None = None

    def check(self) -> None:
        """Raise ConfigError for options without the one that makes the run elastic."""
        given = {
            "--max-workers": self.max_workers,
            "--spares": self.spares,
            "--elastic-timeout": self.timeout,
            "--max-failures": self.max_failures,
        }
        if self.min_workers is None:
            for option, value in given.items():
                if value is not None:
                    raise ConfigError(
                        f"{option} {value:g} needs an elastic run; add --min-workers N, the least"
                        " number of workers to continue with"
                    )
        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise ConfigError(f"--elastic-timeout {self.timeout:g}: expected seconds above 0")

    def check_launcher(self, launcher: str) -> None:
        """Raise ConfigError if another launcher has started this worker, and options are given."""
        if self.min_workers is None:
            return
        least = self.min_workers
        if TICKET in os.environ:
            raise ConfigError(
                f"--min-workers {least}: this run is elastic already, by --min-np of `allstep run`;"
                " omit --min-workers"
            )
        if launcher == "allstep":
            raise ConfigError(
                f"--min-workers {least}: `allstep run` started these workers for a fixed world;"
                f" give it --min-np {least} instead"
            )
        raise ConfigError(
            f"--min-workers {least}: {launcher} cannot replace single workers; start with `allstep"
            f" run --min-np {least} ... allstep train`, or without {launcher}"
        )

    def policy(self, num_workers: int, config: "RunConfig") -> "Policy | None":
        """Return the policy of a run of `num_workers` workers; None for a fixed world.

        In a mode in which workers do not wait for each other at every step, the run continues
        without lost workers also when no option was given.
        """
        from allstep.launch import MAX_FAILURES, Policy

        if self.min_workers is None:
            survives = num_workers > 1 and config.sync.mode.survives_lost_party
            return Policy.continuing(num_workers) if survives else None
        from allstep.train.config.check_config import check_elastic
        from allstep.train.config.check_sync import check_replacements

        spares = self.spares or 0
        most = self.max_workers
        try:
            policy = Policy(
                num_workers,
                self.min_workers,
                num_workers if most is None else most,
                spares=spares,
                max_failures=MAX_FAILURES if self.max_failures is None else self.max_failures,
                elastic_timeout=_TIMEOUT if self.timeout is None else self.timeout,
            )
        except ValueError as error:
            given = f"--workers {num_workers} --min-workers {self.min_workers}"
            given += "" if most is None else f" --max-workers {most}"
            raise ConfigError(f"{given}: {error}") from error
        sizes = range(policy.min_workers, (policy.max_workers or num_workers) + 1)
        check_elastic(config, num_workers, sizes)
        check_replacements(config)
        return policy
