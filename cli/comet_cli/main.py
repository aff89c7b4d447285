"""Arguments in, one of the commands run, an exit code out.

Each command sits in its own file and imports what it needs when it runs, so that `comet --help` answers at once. The
group below turns what a user can mend (CometError) and what the machine lacks into `error:` and `hint:` lines and exit
code 2, and Ctrl-C into 130 (SIGTERM: 143) with a word on how to go on; a traceback is always a defect of ours.
"""

import errno
import signal
from pathlib import Path
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

# The last two are Python's own, of a MemoryError that it had no memory for.
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "Cannot allocate memory",
             "can't start new thread", "failed to map segment", "static TLS",
             "ThreadPoolBuildError", "error return without exception set",
             "returned NULL without setting an exception")  # fmt: skip
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
GO_ON = {  # command -> what Ctrl-C leaves behind
    "pack": "The same command goes on after the last packed layer; a calibration that was not done starts again.",
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
        except KeyboardInterrupt as stop:
            go_on = GO_ON.get(ctx.invoked_subcommand or "", "The same command starts it again.")
            console.talk(f"\nStopped. {go_on}")
            raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from None


class Terminated(KeyboardInterrupt):
    """SIGTERM: an orderly end, as by Ctrl-C."""


def terminate(*_: object) -> None:
    """What SIGTERM does while a command runs."""
    raise Terminated


def of_the_machine(error: BaseException) -> CometError | None:
    """A full disk, a folder that is not ours or too little memory, as an error for people; None if it is a defect."""
    words = str(error)
    if isinstance(error.__cause__, MemoryError):  # in a class that was being made
        error, words = error.__cause__, ""
    if isinstance(error, MemoryError) or any(sign in words for sign in NO_MEMORY):
        where = "GPU" if "CUDA" in words else "machine"
        return CometError(
            f"the memory of this {where} is used up ({words.splitlines()[0] if words else type(error).__name__})",
            "end other programs, or use fewer or shorter windows (--samples, --seq-len); comet pack MODEL --dry-run "
            "says what a run takes",
        )
    if isinstance(error, OSError) and error.errno in OF_THE_DISK:
        from comet_core.whole_files import cannot_write

        return cannot_write(Path(str(error.filename)) if error.filename else Path("a file"), error)
    return None


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
    try:
        signal.signal(signal.SIGTERM, terminate)
        app(prog_name="comet")
    except KeyboardInterrupt as stop:  # before a command's first line
        console.talk("\nStopped. The same command starts it again.")
        raise SystemExit(143 if isinstance(stop, Terminated) else 130) from None
    except BaseException as error:  # a library in Rust that finds no thread raises no Exception
        found = of_the_machine(error)
        if found is None:
            raise
        console.fail(found)
        raise SystemExit(2) from None
