"""Where a number comes from: the command, the code, the machine and the moment, as one flat dictionary.

It reads what is there already (versions from package metadata, the GPU's name from a torch that is loaded) and imports
nothing heavy. Records are published, so the command is written without the folders of the machine it ran on.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


def provenance(
    command: str | None = None,
    *,
    recipe_digest: str | None = None,
    seed: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Where a number comes from.

    Args:
        command: what was typed; None takes this process's own command line.
        recipe_digest: `recipe.digest(...)`, if a recipe was used.
        seed: of calibration or of random weights.
        device: "cpu" or a CUDA device; only for the latter GPU and driver are named.
    """
    gpu = driver = None
    threads = os.cpu_count()
    if torch := sys.modules.get("torch"):  # a number that torch made knows torch's thread count
        threads = torch.get_num_threads()
        if device.startswith("cuda") and torch.cuda.is_available():
            gpu, driver = torch.cuda.get_device_name(device), _driver_version()
    return {
        "command": _anonymous(typed_command() if command is None else command),
        "git": _git_sha(),
        "recipe_digest": recipe_digest,
        "seed": seed,
        "device": device,
        "gpu": gpu,
        "driver": driver,
        "cpu": _cpu_name(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def typed_command() -> str:
    """The command line of this process as a user would type it."""
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return shlex.join([*name.split(), *sys.argv[1:]])


def _anonymous(command: str) -> str:
    """Paths below the working folder become relative, those below home start with ~: records are published."""
    command = command.replace(f"{Path.cwd()}/", "")
    return command.replace(f"{Path.home()}/", "~/")


def comet_version() -> str | None:
    """The version of the installed COMET; None where it runs without being installed."""
    return _version("comet-w4a4kv4")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_sha() -> str | None:
    """Commit of the checkout this file lies in, `+changes` added if tracked files differ.

    Outside a checkout: what the variable COMET_GIT_SHA says (of an exported tree), else None.
    """
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return os.environ.get("COMET_GIT_SHA") or None
    try:
        sha = _run("git", "-C", str(root), "rev-parse", "HEAD")
        changed = _run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return sha + ("+changes" if changed else "")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def _driver_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()
