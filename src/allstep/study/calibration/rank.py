"""What each worker does in a calibration.

```
alone         rank 0 trains at two or more batch sizes; the others wait
input         rank 0 reads batches without training
independent   every rank trains a model of its own, at the same time
sums          an allreduce at three sizes: inside each host, and over the hosts
together      all ranks train one model
```

Every phase uses the parts of a run, with the data and the config of the recipe. Rank 0 prints the
result as marked lines, which the process that started the ranks reads.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from allstep import comm
from allstep.comm.group import agree
from allstep.comm.group.init import group_for
from allstep.console.escape import print_notice
from allstep.costs.speed import Speed
from allstep.errors import ConfigError, UserError
from allstep.machine import allowed_cores
from allstep.plan.calibration import Calibration, HostsTimes, HostTimes, StepTimes, Sums
from allstep.plan.calibration_file import to_json
from allstep.study.calibration.batch_sizes import sizes_of
from allstep.study.calibration.calibrate import EFFORT, MARK
from allstep.study.calibration.same_run import cpu_name
from allstep.study.calibration.step_watch import SECONDS, time_alone, time_input, time_together
from allstep.train.config.check_sync import synchronous
from allstep.train.config.run_config import RunConfig
from allstep.train.folder.scratch import scratch
from allstep.train.run.placed_job import Job
from allstep.train.run.prepare import check, prepare
from allstep.train.run.setup import make_job
from allstep.world import World

_CHUNK = 2000
_SUMS, _LARGEST_SUM, _SMALLEST_SUM = 7, 64e6, 4096
_LONGEST_STEP = 4.0
_SECONDS_TOGETHER = 3.0


def calibrate_here(
    source: str,
    overrides: Sequence[str],
    data: Path | None,
    world: World,
    effort: float = EFFORT,
) -> Calibration | None:
    """Measure in the world of this process. Return the calibration on rank 0. A collective.

    effort: factor on the seconds that each phase measures for.
    """
    config = agree.rank_0_decides(world, lambda: _checked(source, overrides, data, world.size))
    with scratch(world) as folder:
        return _Measurement(config, world, folder, effort).run()


def _checked(source: str, overrides: Sequence[str], data: Path | None, size: int) -> RunConfig:
    prepared = prepare(source, overrides, data)
    check(prepared, size)
    return prepared.config


class _Measurement:
    """The phases of a calibration, on one rank."""

    def __init__(self, config: RunConfig, world: World, folder: Path, effort: float) -> None:
        self.config, self.world, self.folder = config, world, folder
        self.effort = effort
        self.num_hosts = len(set(agree.gather(world, world.host)))
        self.local = min(agree.gather(world, world.local_size))
        self.sizes = sizes_of(config.batch, config.batch_per_worker, self.local)
        self.share = self.sizes[-1] if config.batch_per_worker else self.sizes[-2]

    def run(self) -> Calibration | None:
        world = self.world
        alone = self._job(self.share, World.alone())
        steps = self._alone(alone) if world.rank == 0 else ()
        agree.gather(world, None)
        own = (
            time_alone(alone, self.share, self.effort * _SECONDS_TOGETHER)
            if world.size > 1
            else None
        )
        everyone = agree.gather(world, own)
        facts = self._facts(alone)
        nbytes = _nbytes(alone)
        _close(alone)
        del alone
        host = hosts = None
        shares = False
        if world.size > 1:
            times = [each for each in everyone if each is not None]
            job = self._job(self.share * world.size, world)
            shares = job.shares_weights
            usual = median(each.busy for each in times)
            count = max(4, min(40, int(self.effort * _SECONDS_TOGETHER / usual)))
            together = max(agree.gather(world, time_together(job, count)))
            host, hosts = self._groups(times, sum(nbytes), together)
            _close(job)
        if world.rank != 0:
            return None
        return Calibration(nbytes, steps, facts.pop("num_train"), host, hosts, shares, facts)

    def _job(self, batch: int, world: World) -> Job:
        """Return the job of a run with this batch."""
        config = self.config.model_copy(
            update={"batch": batch, "batch_per_worker": None, "shares": "even"}
        )
        return make_job(synchronous(config.resolved(world.size)), world, self.folder)

    def _alone(self, job: Job) -> tuple[StepTimes, ...]:
        """Return the times of one worker at all sizes that do not take too long."""
        found: list[StepTimes] = []
        for batch in self.sizes:
            if len(found) > 1 and found[-1].busy * batch / found[-1].batch > _LONGEST_STEP:
                break
            found.append(time_alone(job, batch, self.effort * SECONDS))
        each = time_input(job, self.share, self.effort) / self.share
        return tuple(replace(step, input=max(step.input, each * step.batch)) for step in found)

    def _groups(
        self, times: list[StepTimes], nbytes: float, together: float
    ) -> tuple[HostTimes | None, HostsTimes | None]:
        """Return what was measured of one host, and of several. A collective."""
        world, inside = self.world, None
        members = agree.gather(world, world.host)
        for host in dict.fromkeys(members):
            group = dist.new_group([rank for rank, each in enumerate(members) if each == host])
            inside = group if host == world.host else inside
        sums = _sums(world, nbytes, lambda flat: dist.all_reduce(flat, group=inside))
        first = [each for each, host in zip(times, members, strict=True) if host == members[0]]
        alone_together = together if self.num_hosts == 1 else None
        on_host = None
        if len(first) > 1:
            by_rank = tuple(each.compute for each in first)
            on_host = HostTimes(len(first), _mean(first), by_rank, sums, alone_together)
        if self.num_hosts == 1:
            return on_host, None
        gradients = group_for("gradients")
        over = _sums(world, nbytes, lambda flat: gradients.sum_scaled(flat, 1.0))
        link = agree.gather(world, _link(gradients, self.local))[0]
        if link is None:
            raise ConfigError(
                "ALLSTEP_ALGORITHM is set, so the link is not measured; unset it to calibrate"
            )
        return on_host, HostsTimes(self.num_hosts, self.local, link, self.share, over, together)

    def _facts(self, job: Job) -> dict[str, Any]:
        config = job.config
        return {
            "num_train": job.num_train,
            "recipe": config.recipe,
            "model": config.model.name,
            "options": json.dumps(dict(config.model.options), sort_keys=True, default=str),
            "parameters": sum(each.numel() for each in job.trainer.model.parameters()),
            "image": "x".join(map(str, job.splits.shape)),
            "batch": self.config.batch or 0,
            "batch_per_worker": self.config.batch_per_worker or 0,
            "precision": job.trainer.precision.name,
            "optimizer": config.optimizer.name,
            "cpu": cpu_name(),
            "cores": allowed_cores(),
            "device": str(job.trainer.precision.device.type),
            "threads": torch.get_num_threads(),
            "system": platform.system() + " " + platform.machine(),
            "torch": torch.__version__,
            "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        }


def _close(job: Job) -> None:
    for loader in job.loaders.values():
        loader.close()


def _nbytes(job: Job) -> tuple[float, ...]:
    parameters = [each for each in job.trainer.model.parameters() if each.requires_grad]
    return tuple(float(each.numel() * each.element_size()) for each in parameters)


def _mean(times: Sequence[StepTimes]) -> StepTimes:
    """Return the mean over ranks."""
    return StepTimes(
        times[0].batch,
        fmean(each.forward for each in times),
        fmean(each.backward for each in times),
        tuple(fmean(each) for each in zip(*(one.ready for one in times), strict=True)),
        fmean(each.update for each in times),
        fmean(each.input for each in times),
        fmean(each.jitter for each in times),
    )


def _sums(world: World, nbytes: float, add_up: Any) -> Sums:
    """Return the seconds of an allreduce at three sizes, of the slowest rank. A collective."""
    largest = min(_LARGEST_SUM, max(_SMALLEST_SUM * 64, nbytes))
    found = []
    for size in (largest, largest / 8, largest / 64):
        flat = torch.zeros(int(size) // 4)
        times = []
        for _ in range(_SUMS):
            began = time.perf_counter()
            add_up(flat)
            times.append(time.perf_counter() - began)
        mine = median(times[2:])
        found.append((float(flat.numel() * 4), max(agree.gather(world, mine))))
    return tuple(found)


def _link(group: Any, local: int) -> Speed | None:
    """Return the link between the hosts as the lanes measured it: each had its share of it."""
    crossing = group.local.crossing
    speed: Speed | None = None if crossing.lane is None else crossing.lane.speed
    if speed is None:
        return None
    return Speed(speed.latency, local * speed.bandwidth, speed.adding)


def main(request: str) -> None:
    """Measure as one rank, started by `allstep run`; rank 0 prints the calibration."""
    os.environ.setdefault("ALLSTEP_STALL_SECONDS", "300")
    asked = json.loads(request)
    try:
        world = comm.init()
        data = None if asked["data"] is None else Path(asked["data"])
        found = calibrate_here(asked["source"], asked["overrides"], data, world, asked["effort"])
        comm.shutdown()
    except UserError as error:
        print_notice(str(error))
        raise SystemExit(error.exit_code) from None
    if found is not None:
        text = json.dumps(json.loads(to_json(found)))
        for start in range(0, len(text), _CHUNK):
            print(MARK + text[start : start + _CHUNK] + ".", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
