"""`allstep plan RECIPE`: from options to a plan, with a calibration that is measured or read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allstep.console.escape import print_notice
from allstep.errors import ConfigError

if TYPE_CHECKING:
    from allstep.plan.answers.plan_table import Plan
    from allstep.plan.calibration import Calibration
    from allstep.plan.knowledge import Knowledge
    from allstep.plan.prediction import Question
    from allstep.train.config.run_config import RunConfig

_PER_HOST_ELSEWHERE = 8
_ASSUMED_LINK = "10Gbit/25us"
_USUAL = "1,2,4,...,64"
_SHAPE_BATCH = 8


@dataclass(frozen=True)
class ClusterOptions:
    """The options about the cluster, as texts and numbers."""

    per_host: int | None = None
    link: str | None = None
    inside: str | None = None
    alone: str | None = None


@dataclass(frozen=True)
class CalibrationOptions:
    """The options about what is measured, and where it is kept."""

    source: Path | None = None
    """A file with a calibration."""
    like: Path | None = None
    hosts: str | None = None
    out: Path | None = None
    again: bool = False
    data: Path | None = None


@dataclass(frozen=True)
class PlanOptions:
    """All options of a plan."""

    arguments: Sequence[str]
    workers: str | None
    batch: int | None
    batch_per_worker: int | None
    what_if: str | None
    trust: bool
    cluster: ClusterOptions
    measured: CalibrationOptions


def plan_of(options: PlanOptions) -> "Plan | None":
    """Return the plan; None on the other ranks of a world in which it was measured."""
    from allstep.plan.answers.plan_table import make_plan
    from allstep.plan.answers.question_text import read_workers, with_change

    recipe, overrides = split_recipe(options)
    # Errors in the options come before a measurement.
    workers = read_workers(options.workers or _USUAL)
    config = _config(recipe, overrides, options)
    found = _calibration(recipe, overrides, options, config)
    if found is None:
        return None
    calibration, known = found
    question, is_assumed = _question(options, calibration, known, config, workers)
    if options.workers is None:
        workers = [each for each in workers if each <= question.of_step(1)]
    _check_samples(question, workers)
    changed = with_change(question, options.what_if) if options.what_if else None
    if changed is not None:
        _check_samples(changed, workers)
    return make_plan(
        config.title,
        calibration,
        known,
        question,
        workers,
        changed,
        options.what_if or "",
        is_assumed,
    )


def split_recipe(options: PlanOptions) -> tuple[str, list[str]]:
    """Return the recipe or config file and the KEY=VALUE overrides; ConfigError without one."""
    from allstep.train.config.read_config import split_arguments

    sources, overrides = split_arguments(list(options.arguments))
    if len(sources) != 1:
        found = ", ".join(map(repr, sources)) or "none"
        raise ConfigError(
            f"allstep plan: expected one recipe or config file, found {found}; or --published,"
            " which compares predictions with published measurements"
        )
    return sources[0], [*overrides, "trust=true"] if options.trust else overrides


def _config(recipe: str, overrides: Sequence[str], options: PlanOptions) -> "RunConfig":
    """Return the config; check the options that do not need a calibration."""
    from allstep.plan.answers.question_text import read_alone, with_change
    from allstep.plan.prediction import Question
    from allstep.plan.transports import read_link
    from allstep.train.config.read_config import read_config

    if options.batch is not None and options.batch_per_worker is not None:
        raise ConfigError(
            "--batch is the batch of all workers, --batch-per-worker that of each; give one of them"
        )
    if options.measured.out is not None and options.measured.source is not None:
        raise ConfigError("--from reads a calibration, --out names one to write; give one of them")
    if options.cluster.alone is not None:
        read_alone(options.cluster.alone)
    if options.cluster.link is not None:
        read_link(options.cluster.link)
    if options.what_if is not None:
        with_change(Question(1, batch=1), options.what_if)
    if options.cluster.alone is not None and options.measured.like is not None:
        raise ConfigError("--alone and --like both give the speed of a worker; give one of them")
    if options.measured.hosts is not None and (options.measured.source or options.measured.like):
        raise ConfigError("-H measures on hosts, --from and --like do not measure; give one")
    return read_config(recipe, overrides)


def _question(
    options: PlanOptions,
    calibration: "Calibration",
    known: "Knowledge",
    config: "RunConfig",
    workers: Sequence[int],
) -> tuple["Question", bool]:
    """Return the question, and whether its link is an assumption."""
    from allstep.plan.prediction import Question
    from allstep.plan.transports import INSIDE, read_link

    batch, each = _batch(options, calibration, config)
    usual = _PER_HOST_ELSEWHERE if options.cluster.alone else known.per_host
    per_host = options.cluster.per_host or usual
    link = None if options.cluster.link is None else read_link(options.cluster.link)
    is_assumed = link is None and known.link is None and workers[-1] > per_host
    inside = INSIDE["pcie"] if options.cluster.alone else None
    if options.cluster.inside is not None:
        inside = INSIDE.get(options.cluster.inside) or read_link(options.cluster.inside)
    return (
        Question(
            per_host,
            batch=batch,
            batch_per_worker=each,
            link=read_link(_ASSUMED_LINK) if is_assumed else link,
            inside=inside,
        ),
        is_assumed,
    )


def _batch(
    options: PlanOptions, calibration: "Calibration", config: "RunConfig"
) -> tuple[int | None, int | None]:
    """Return the batch of all workers or that of each: the option's, the recipe's, or measured."""
    if options.batch is not None or options.batch_per_worker is not None:
        return options.batch, options.batch_per_worker
    if config.batch_per_worker is not None:
        return None, config.batch_per_worker
    measured = calibration.facts.get("batch") or calibration.largest_batch
    return config.batch or int(measured), None


def _check_samples(question: "Question", workers: Sequence[int]) -> None:
    if question.batch is not None and (not workers or question.batch < workers[-1]):
        most = workers[-1] if workers else 1
        raise ConfigError(
            f"batch {question.batch}: has fewer samples than {most:,} workers; give fewer"
            " --workers, a larger --batch, or --batch-per-worker"
        )


# The calibration


def _calibration(
    recipe: str, overrides: Sequence[str], options: PlanOptions, config: "RunConfig"
) -> "tuple[Calibration, Knowledge] | None":
    """Return the calibration and what it shows: read, taken from a run, or measured."""
    from allstep.plan.calibration_file import read_calibration
    from allstep.plan.prediction import knowledge
    from allstep.study.calibration.same_run import check_same_run

    if options.measured.source is not None:
        calibration = read_calibration(options.measured.source)
        given = options.batch is not None or options.batch_per_worker is not None
        check_same_run(calibration, config, str(options.measured.source), given)
    elif options.measured.like is not None:
        calibration = None
    else:
        calibration = _measured_or_kept(recipe, overrides, options, config)
        if calibration is None:
            return None
    if options.measured.like is not None:
        from allstep.study.calibration.read_run import calibration_of_run

        return calibration_of_run(options.measured.like, calibration)
    assert calibration is not None
    if options.cluster.alone is not None:
        calibration = _elsewhere(calibration, options, config)
    return calibration, knowledge(calibration)


def _elsewhere(
    calibration: "Calibration", options: PlanOptions, config: "RunConfig"
) -> "Calibration":
    from allstep.plan.answers.alone import batches_known, with_speeds
    from allstep.plan.answers.question_text import read_alone

    assert options.cluster.alone is not None
    batch, each = _batch(options, calibration, config)
    return with_speeds(calibration, batches_known(read_alone(options.cluster.alone), batch, each))


def _measured_or_kept(
    recipe: str, overrides: Sequence[str], options: PlanOptions, config: "RunConfig"
) -> "Calibration | None":
    """Return the calibration of an earlier call, or measure; None on other ranks of a world."""
    from allstep.plan.calibration_file import read_calibration, to_json
    from allstep.study.calibration.same_run import check_same_machine, check_same_run
    from allstep.world import NONE, World

    name = Path(recipe).stem + ("-shape" if options.cluster.alone else "")
    file = options.measured.out or Path("plans") / f"{name}.json"
    alone = World.detect().launcher == NONE
    if file.exists() and not options.measured.again and options.measured.hosts is None and alone:
        kept = read_calibration(file)
        given = options.batch is not None or options.batch_per_worker is not None
        advice = "--calibrate measures again, --out FILE keeps both"
        check_same_run(kept, config, str(file), given or options.cluster.alone is not None, advice)
        if options.cluster.alone is None:
            check_same_machine(kept, str(file))
        print_notice(
            f"calibrated {kept.facts.get('time')}, kept in {file}; --calibrate measures again"
        )
        return kept
    found = _measure(recipe, overrides, options) if alone else _measure_in_world(recipe, options)
    if found is not None:
        _write(file, to_json(found))
        print_notice(f"the calibration is in {file}")
    return found


def _measure_in_world(recipe: str, options: PlanOptions) -> "Calibration | None":
    """Measure with the workers of this world; return the calibration on rank 0."""
    from allstep import comm
    from allstep.study.calibration.rank import calibrate_here

    overrides = split_recipe(options)[1]
    found = calibrate_here(recipe, overrides, options.measured.data, comm.init())
    comm.shutdown()
    return found


def _measure(recipe: str, overrides: Sequence[str], options: PlanOptions) -> "Calibration":
    from allstep.console.progress_bar import file_bars
    from allstep.study.calibration.calibrate import calibrate
    from allstep.train.config.num_workers import default_num_workers
    from allstep.train.run.prepare import prepare

    # Missing data is downloaded here, and errors in it are reported at once.
    with file_bars() as progress:
        config = prepare(recipe, overrides, options.measured.data, progress).config
    # No more workers than the machine has room for: others would measure their own crowd.
    count = default_num_workers(config)
    count = min(count, options.cluster.per_host or count)
    if options.cluster.alone is not None:
        # Only bytes and shape of a step are needed; the speeds are given.
        key = "batch_per_worker" if config.batch_per_worker else "batch"
        count, overrides = 1, [*overrides, f"{key}={_SHAPE_BATCH}"]
    where = options.measured.hosts or f"{count} worker{'s' if count > 1 else ''} of this machine"
    print_notice(f"calibrating on {where}: under a minute")
    return calibrate(recipe, overrides, options.measured.data, count, options.measured.hosts)


def _write(file: Path, text: str) -> None:
    from allstep.files.atomic import replace_file

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file.absolute(), text.encode())
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written: {error.strerror or error}; give another file with --out"
        ) from error
