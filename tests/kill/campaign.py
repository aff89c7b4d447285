"""Stops every command of COMET at random moments and starts it again; counts what is left behind.

    PYTHONPATH=cuda:cli:. python tests/kill/campaign.py --stops 20 --seed 1 [--command pack] [--record FILE.jsonl]

For each command: two undisturbed runs say what its files are and how long it takes. Then it is stopped again and again,
by SIGKILL, SIGTERM, SIGINT, a disk that is full or cannot be written (a tmpfs where one can be mounted, else
RLIMIT_FSIZE), too little memory (RLIMIT_AS) or a second command at once, and started on what is there; at last it runs
undisturbed. After every stop a reader must either refuse what is there or find the undisturbed run's content; a refusal
of the command itself must come with a hint and exit code 2 and never with a traceback; at the end the bytes must be the
undisturbed run's, and nothing else may lie there.

The process imports torch once and forks: a child is the command from its first line on. With --exec each is a process
of its own, so that imports are interrupted too.
"""

import argparse
import collections
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(ROOT / part) for part in ("cuda", "cli", "."))
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
ROOM = "size=256m"
LOCKED = ("calibrate", "pack", "pack-all")  # two of the others at once do the same work twice, no harm
LIMIT = 240  # seconds a run may take
MOST_TRIES = 5  # for each stop: others had finished before their moment came
REFUSED = "is not empty"  # what an export says of a folder that holds a finished one
IGNORED = (".lock", "__pycache__")  # the lock's file stays


@dataclass(frozen=True)
class Command:
    """One command, what it writes, and who reads that."""

    arguments: list[str]
    out: str  # file or folder below the working folder that it writes
    read: Callable[[Path], Any]  # the content, or CometError if it is not whole


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder (or the one file), without locks."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*")) if folder.exists() else []
    return {str(f.relative_to(folder)): f.read_bytes() for f in files if f.is_file() and not f.name.endswith(IGNORED)}


def part_of(found: Any, expected: Any) -> bool:
    """Whether what a reader found is what an undisturbed run wrote, or less: nothing, the first records, some files."""
    if isinstance(found, list):  # of records, which every run appends to: first ones of each run
        place = 0
        for one in found:
            place = place + 1 if place < len(expected) and one == expected[place] else int(one == expected[0])
            if not place:
                return False
        return True
    if isinstance(found, dict):
        return all(expected.get(name) == data for name, data in found.items() if not name.endswith(".tmp"))
    return found is None or bool(found == expected)


def mount(*command: str | Path) -> bool:
    """One call of mount or umount; whether it worked."""
    return not subprocess.run(list(map(str, command)), capture_output=True).returncode


class Campaign:
    """A folder with a tiny model, its calibration and packed forms, and the commands on them."""

    def __init__(self, home: Path, log: Callable[[str], None]) -> None:
        self.home, self.log = home, log
        self.failures: list[dict[str, Any]] = []
        self.can_mount, self.mounted = os.geteuid() == 0 and shutil.which("mount") is not None, False
        self.outcomes: collections.Counter[str] = collections.Counter()
        os.environ |= {
            "COMET_CACHE_DIR": str(home / "cache"),
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
            "PYTHONPATH": PATHS,
        }
        sys.path.insert(0, str(ROOT / "tests" / "comet_core"))
        import conftest as tiny  # the tiny models of the tests

        make = home / "make"
        config = tiny.llama(num_hidden_layers=3)
        config.architectures = ["LlamaForCausalLM"]
        tiny.save_model(make / "model", config)
        self.commands = self._commands(make)

    def _commands(self, make: Path) -> dict[str, Command]:
        from comet_core.calibration import load_calibration
        from comet_core.packed import load_packed

        model, text = str(make / "model"), str(make / "model" / "text.txt")
        small = ["--data", text, "--samples", "2", "--seq-len", "32", "--device", "cpu", "--threads", "1"]
        undisturbed = (
            ["calibrate", model, *small, "--out", "made/calibration"],
            ["pack", model, "--calibration", "made/calibration", "--out", "made/packed", "--device", "cpu"],
            ["calibrate", model, *small, "--recipe", "w4a16", "--out", "w4a16/calibration"],
            ["pack", model, "--calibration", "w4a16/calibration", "--out", "w4a16/packed", "--device", "cpu"],
        )
        for arguments in undisturbed:
            code, said = self.run(make, arguments)
            if code:
                raise RuntimeError(f"{arguments}: {code}\n{said}")
        packed, plain = str(make / "made" / "packed"), str(make / "w4a16" / "packed")
        table = make / "table.yaml"
        table.write_text(TABLE.format(model=model, text=text), encoding="utf-8")

        def json_lines(path: Path) -> Any:
            from comet_core.results import read

            return [{k: v for k, v in one.items() if k != "provenance"} for one in read(path)]

        def exported(folder: Path) -> Any:
            if not (folder / "config.json").exists():
                from comet_cuda.errors import CometError

                raise CometError("no model here", "as transformers says")
            return content(folder)

        def converted(folder: Path) -> Any:
            from comet_core.gguf_folder import FORMAT_VERSION

            return content(next((f for f in folder.glob(f"*-v{FORMAT_VERSION}")), folder / "none"))

        self.gguf(make / "tiny.gguf")
        letters = make / "letters.txt"
        letters.write_text("abcabbcab" * 200, encoding="utf-8")
        ppl = ["--ppl", text, "--seq-len", "32", "--windows", "4", "--device", "cpu", "--no-compare"]
        return {
            "calibrate": Command(["calibrate", model, *small, "--out", "out"], "out",
                                 lambda f: str(load_calibration(f))),
            "pack": Command(
                ["pack", model, "--calibration", str(make / "made" / "calibration"), "--out", "out", "--device", "cpu"],
                "out", lambda f: load_packed(f, verify=True).manifest.sha256,
            ),
            "pack-all": Command(["pack", model, *small], "runs", lambda f: content(f / "model-w4a4kv4" / "packed")
                                if (f / "model-w4a4kv4" / "packed" / "config.json").exists() else None),
            "export": Command(["export", plain, "--out", "out"], "out", exported),
            "report": Command(["report", str(make / "made"), "--out", "out/page.html", "--tables", "out"], "out",
                              lambda f: (f / "page.html").read_bytes() if (f / "page.html").exists() else None),
            "eval": Command(["eval", packed, *ppl, "--record", "out/records.jsonl"], "out/records.jsonl", json_lines),
            "reproduce": Command(["reproduce", str(table), "--out", "out", "--device", "cpu", "--threads", "1"], "out",
                                 lambda f: json_lines(f / "records.jsonl") if (f / "records.jsonl").exists() else None),
            "reproduce-speed": Command(["reproduce-speed", "--report-only", "--records",
                                        str(ROOT / "results" / "measured"), "--out", "out"], "out", content),
            "roofline": Command(["bench", "--roofline", "--model", "llama-7b", "--plots", "out"], "out", content),
            "convert": Command(["calibrate", str(make / "tiny.gguf"), *small, "--data", str(letters), "--recipe",
                                "w4a16", "--out", "out"], "cache/converted", converted),
        }  # fmt: skip

    def gguf(self, path: Path) -> None:
        """A Llama of one layer as a GGUF file, with a tokenizer of single bytes."""
        import importlib.util

        spec = importlib.util.spec_from_file_location("sources", ROOT / "tests" / "comet_core" / "test_model_source.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.write_gguf(path)

    def run(self, folder: Path, arguments: list[str], stop: dict[str, Any] | None = None) -> tuple[int, str]:
        """One run in `folder`; exit code (negative: the signal that ended it) and what it said."""
        stop = stop or {}
        folder.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()  # what a command says fits into a pipe
        if stop.get("exec"):
            child = subprocess.Popen([sys.executable, "-m", "comet_cli", *arguments], cwd=folder, stdout=writer,
                                     stderr=writer).pid  # fmt: skip
        else:
            child = os.fork()
            if not child:
                os.close(reader)
                self._become(folder, arguments, writer, stop)
        os.close(writer)
        if "second" in stop:  # the first is held at some moment, and another one started
            time.sleep(stop["second"])
            os.kill(child, signal.SIGSTOP)
            other = self.run(folder, arguments)
            os.kill(child, signal.SIGCONT)
            if other[0] == 2 and "another command is writing into this folder" not in other[1]:
                self.log(f"the second: {other}")
                return 97, other[1]
        code = self._ended(child, stop)
        os.set_blocking(reader, False)
        try:
            said = os.read(reader, 1 << 20).decode(errors="replace")
        except BlockingIOError:  # nothing said, and something still holds the other end
            said = ""
        os.close(reader)
        return code, said

    def _ended(self, child: int, stop: dict[str, Any]) -> int:
        """Wait for the child, or stop it; its exit code."""
        deadline, kill = time.monotonic() + LIMIT, time.monotonic() + stop.get("after", LIMIT)
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            now = time.monotonic()
            if "signal" in stop and now > kill:
                os.kill(child, SIGNALS[stop["signal"]])
                kill = deadline
            if now > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return 999
            time.sleep(0.005)

    def _become(self, folder: Path, arguments: list[str], sink: int, stop: dict[str, Any]) -> None:
        """In the forked child: be the command."""
        code = 99
        try:
            os.chdir(folder)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            if "memory" in stop:
                held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (held + stop["memory"], held + stop["memory"]))
            if "file_size" in stop:
                resource.setrlimit(resource.RLIMIT_FSIZE, (stop["file_size"], stop["file_size"]))
            faulthandler.enable(sys.stderr)
            faulthandler.dump_traceback_later(LIMIT - 20, file=sys.stderr)  # of a command that hangs
            sys.argv = ["comet", *arguments]
            from comet_cli.main import main

            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 98
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def fail(self, name: str, one: str, stop: Any, what: str) -> None:
        """Note a failure."""
        self.failures.append({"command": name, "input": one, "stop": stop, "what": what[-600:]})
        self.log(f"FAILED {name} {one} {stop}: {what[-600:]}")

    def fresh(self, folder: Path) -> None:
        """An empty working folder, on a disk of its own where one can be mounted, and an empty cache."""
        if self.mounted:
            mount("umount", folder)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self.home / "cache", ignore_errors=True)
        folder.mkdir()
        self.mounted = self.can_mount and mount("mount", "-t", "tmpfs", "-o", ROOM, "tmpfs", folder)

    @contextmanager
    def room(self, folder: Path, stop: dict[str, Any]) -> Iterator[None]:
        """The folder as the stop wants it: full but for a few bytes, or not to be written."""
        if "room" in stop:
            used = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
            mount("mount", "-o", f"remount,size={used + stop['room']}", folder)
        if "read-only" in stop:
            mount("mount", "-o", "remount,ro", folder)
        yield
        if stop.keys() & {"room", "read-only"}:
            mount("mount", "-o", f"remount,rw,{ROOM}", folder)

    def state(self, folder: Path, command: Command) -> Path:
        """Where the command's result lies."""
        return self.home / command.out if command.out.startswith("cache/") else folder / command.out

    def torture(self, name: str, stops: int, seed: int, kinds: tuple[str, ...], *, execute: bool) -> None:
        """Stop one command `stops` times, starting it on what is there each time, and finish it; again until enough
        were stopped."""
        from comet_cuda.errors import CometError

        command, folder = self.commands[name], self.home / "work"
        took = float("inf")
        for _ in range(2):  # the first one takes longer than all that follow: files and libraries are cold
            self.fresh(folder)
            start = time.monotonic()
            code, said = self.run(folder, command.arguments, {"exec": execute})
            took = min(took, time.monotonic() - start)
            if code:
                self.fail(name, "undisturbed", None, f"exit {code}: {said}")
                return
        whole, expected = self.files(folder, command), command.read(self.state(folder, command))
        rng = random.Random(f"{seed}-{name}")
        done = tries = 0  # runs that were stopped or refused, and all
        while done < stops and tries < MOST_TRIES * stops:
            self.fresh(folder)
            for attempt in range(rng.randint(1, 3)):
                stop = self.draw(rng, [k for k in kinds if k != "second" or name in LOCKED], took, execute)
                start = time.monotonic()
                with self.room(folder, stop):
                    code, said = self.run(folder, command.arguments, stop)
                tries += 1
                if code == 0 and attempt == 0:  # the machine is less busy than at the undisturbed runs
                    took = min(took, time.monotonic() - start)
                if code == 2 and REFUSED in said and self.files(folder, command) == whole:
                    code = 0  # it was stopped after its last write, and a second run does not touch what is whole
                done += code != 0
                self.outcomes[self.verdict(name, f"{seed}-{tries}", stop, code, said)] += 1
                try:
                    found = command.read(self.state(folder, command))
                    if not part_of(found, expected):
                        self.fail(name, f"{seed}-{tries}", stop, "something half-written is taken for whole")
                except CometError as error:
                    if not error.hint:
                        self.fail(name, f"{seed}-{tries}", stop, f"no hint: {error.message}")
                except FileNotFoundError:
                    pass  # a folder that is not there yet
                if code == 0:
                    break
            if code:
                code, said = self.run(folder, command.arguments, {"exec": execute})
            if code and not (REFUSED in said and self.files(folder, command) == whole):
                self.fail(name, f"{seed}-{tries}", "the run after the stops", f"exit {code}: {said}")
            elif (now := self.files(folder, command)) != whole:
                different = sorted(k for k in now.keys() | whole.keys() if now.get(k) != whole.get(k))
                self.fail(name, f"{seed}-{tries}", "after all stops", f"other bytes or files: {different[:5]}")
            else:
                self.outcomes["finished with the same bytes"] += 1

    def files(self, folder: Path, command: Command) -> dict[str, Any]:
        """What the command wrote, without the moments and machines that records hold."""
        found: dict[str, Any] = dict(content(self.state(folder, command)))
        for name, data in list(found.items()):
            if name.endswith("records.jsonl") or name == ".":
                lines = [json.loads(line) for line in data.decode().splitlines() if line.strip()]
                found[name] = [{k: v for k, v in one.items() if k != "provenance"} for one in lines][-1:]
        return found

    def draw(self, rng: random.Random, kinds: list[str], took: float, execute: bool) -> dict[str, Any]:
        """One way to stop a run that takes `took` seconds."""
        kind = rng.choice(kinds)
        if kind in SIGNALS:
            return {"signal": kind, "after": rng.uniform(0, 1.05) * took, "exec": execute}
        if kind == "second":
            return {"second": rng.uniform(0, 1) * took, "exec": execute}
        if kind == "disk":
            return (
                {"room": int(10 ** rng.uniform(3, 6))}
                if self.mounted
                else {"file_size": int(10 ** rng.uniform(1, 5.7))}
            )
        if kind == "read-only":
            return {"read-only": True} if self.mounted else {"file_size": 0}
        return {"memory": int(10 ** rng.uniform(6, 8.3))}

    def verdict(self, name: str, one: str, stop: dict[str, Any], code: int, said: str) -> str:
        """What a stopped run's end was; everything that is not foreseen is a failure."""
        kind = stop.get("signal") or next(
            k for k in ("second", "memory", "read-only", "room", "file_size") if k in stop
        )
        if code == 0:
            return f"{kind}: had finished"
        fine = {
            "second": (2,),
            "read-only": (2,),
            "room": (2,),
            "file_size": (2,),
            "SIGKILL": (-9,),
            "SIGTERM": (143, 130, -15),
            "SIGINT": (130, -2),
            "memory": (2,),
        }[kind]
        started_up = stop.get("exec") and code in (1, -2, -15)  # Ctrl-C before the command's first line
        if kind == "memory" and code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
            return f"{kind}: a library crashed"  # one that does not look whether it was given memory
        if code not in fine and not started_up:
            self.fail(name, one, stop, f"exit {code}: {said}")
            return f"{kind}: failed"
        if "Traceback" in said and not started_up:
            self.fail(name, one, stop, f"a traceback: {said}")
        if code == 2 and "hint:" not in said:
            self.fail(name, one, stop, f"no hint: {said}")
        return f"{kind}: stopped"


TABLE = """title: A table of two cells
metric: perplexity
data: {text}
seq_len: 32
windows: 4
calibration: {{samples: 2, seq_len: 32, data: {text}}}
models: [{model}]
rows:
  - {{scheme: W4A4KV4, method: COMET, recipe: w4a4kv4}}
  - {{scheme: W4A16, method: round, recipe: w4a16}}
"""
ALL = ("SIGKILL", "SIGTERM", "SIGINT", "disk", "read-only", "memory", "second")


def main() -> int:
    """Run, print, record; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=4, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", action="append", help="only this one; may be repeated")
    parser.add_argument("--kind", action="append", choices=ALL)
    parser.add_argument("--exec", action="store_true")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unmounts and removes what it made
    import torch

    torch.set_num_threads(1)
    from comet_cli.main import app  # noqa: F401 - imported before the fork, as all below
    from comet_core import calibrate, evaluate, pack, preflight, report, reproduce  # noqa: F401

    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="comet-kill-") as home:
        campaign = Campaign(Path(home), print)
        names = args.command or list(campaign.commands)
        for name in names:
            began = time.monotonic()
            try:
                campaign.torture(name, args.stops, args.seed, tuple(args.kind or ALL), execute=args.exec)
            finally:
                if campaign.mounted:
                    campaign.mounted = not mount("umount", Path(home) / "work")
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    found = {"seed": args.seed, "commands": names, "runs": args.stops * len(names), "outcomes": dict(campaign.outcomes),
             "failures": campaign.failures, "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
    print(json.dumps(found | {"failures": len(campaign.failures)}))
    if args.record:
        from comet_core.provenance import provenance
        from comet_core.results import append

        typed = f"python tests/kill/campaign.py --stops {args.stops} --seed {args.seed}" + " --exec" * args.exec
        append(args.record, {"kind": "kills", **found, "provenance": provenance(typed, seed=args.seed)})
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
