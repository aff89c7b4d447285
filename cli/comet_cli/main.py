"""Arguments in, one of the commands run, an exit code out.

Each command sits in its own file and imports what it needs when it runs, so that `comet --help` answers at once. The
group below turns what a user can mend (CometError) into `error:` and `hint:` lines and exit code 2, and Ctrl-C into
130 with a word on how to go on; a traceback is always a defect of ours.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from comet_cli import (
    bench,
    bench_kernel,
    calibrate,
    console,
    demo,
    doctor,
    evaluate,
    export,
    inspect,
    pack,
    report,
    reproduce,
    reproduce_speed,
)
from comet_cuda.errors import CometError

GO_ON = {  # command -> what Ctrl-C leaves behind
    "pack": "The same command goes on after the last finished layer.",
    "demo": "The same command goes on; finished steps are kept.",
}


class CometGroup(TyperGroup):
    """A command group whose errors are read by people."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CometError as error:
            console.fail(error)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            go_on = GO_ON.get(ctx.invoked_subcommand or "", "The same command starts it again.")
            console.talk(f"\nStopped. {go_on}")
            raise typer.Exit(130) from None


def print_version(wanted: bool) -> None:
    """`comet --version`: the version on stdout, then the end."""
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            console.data(f"comet {version('comet-w4a4kv4')}")
        except PackageNotFoundError:
            console.data("comet (not installed: run from its source folder)")
        raise typer.Exit


app = typer.Typer(cls=CometGroup, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def comet(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Quantize language models to 4-bit weights, activations and KV cache; pack, evaluate and benchmark them."""


app.command("calibrate")(calibrate.calibrate)
app.command("pack")(pack.pack)
app.command("eval")(evaluate.evaluate)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(bench.app, name="bench")
app.command("reproduce-speed")(reproduce_speed.reproduce_speed)
bench.app.command("kernel")(bench_kernel.kernel)
app.command("inspect")(inspect.inspect)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Entry point of the `comet` script."""
    app(prog_name="comet")
