"""The typer application `allstep` with all its verbs."""

from typing import Annotated

import typer

from allstep._version import __version__
from allstep.cli.bench import bench
from allstep.cli.data import data
from allstep.cli.doctor import doctor
from allstep.cli.horovod.path import horovod_path
from allstep.cli.planning.plan_speed import plan
from allstep.cli.report import report
from allstep.cli.run import run
from allstep.cli.saved_run.eval import eval_
from allstep.cli.saved_run.landscape import landscape
from allstep.cli.saved_run.predict import predict
from allstep.cli.saved_run.replay import replay
from allstep.cli.scale import scale
from allstep.cli.shortage import check_memory
from allstep.cli.study import study
from allstep.cli.train import train
from allstep.cli.verify import verify

app = typer.Typer(
    name="allstep",
    help="Scale a training script from one process to many workers and hosts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_NEED_TORCH = ("train", "verify", "replay", "eval", "predict", "landscape", "study", "scale")


def _version(asked: bool) -> None:
    """Print the version and exit, if --version is given."""
    if asked:
        print(f"allstep {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Check the memory limit before a verb that imports torch."""
    if context.invoked_subcommand in _NEED_TORCH:
        check_memory()


app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(train)
app.command()(verify)
app.command()(replay)
app.command()(report)
app.command()(plan)
app.command()(scale)
app.command()(predict)
app.command("eval")(eval_)
app.command()(landscape)
app.add_typer(study)
app.add_typer(data)
app.add_typer(bench)
app.command()(doctor)
app.command()(horovod_path)
