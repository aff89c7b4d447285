"""The wheel: built from a copy of the sources, resolved with its extras, installed into a clean environment, run."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("cli", "comet_core", "cuda", "recipes", "pyproject.toml", "README.md", "LICENSE")
NEEDED_FOR_HELP = ("typer", "rich", "pyyaml", "filelock")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        source = ROOT / part
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(source, copy / part, ignore=ignore) if source.is_dir() else shutil.copy(source, copy / part)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, copy)
    return next(out.glob("*.whl"))


def test_it_holds_what_runs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for root, package in (("cli", "comet_cli"), (".", "comet_core"), ("cuda", "comet_cuda"), (".", "recipes")):
        for file in (ROOT / root / package).rglob("*"):
            if file.suffix in (".py", ".cu", ".cuh", ".yaml", ".json"):
                inside = file.relative_to(ROOT / root).as_posix()
                assert inside.replace("recipes/", "comet_recipes/") in names or "__pycache__" in inside, inside


@pytest.mark.parametrize("extras", ["eval,cuda", "eval,cuda,vllm"])
def test_its_extras_resolve(wheel: Path, extras: str) -> None:
    report = run(
        sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-",
        f"{wheel}[{extras}]",
    )  # fmt: skip
    chosen = {item["metadata"]["name"].lower().replace("_", "-") for item in json.loads(report)["install"]}
    assert {"torch", "transformers", "lm-eval", "cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc"} <= chosen
    assert ("vllm" in chosen) == ("vllm" in extras)


def test_it_runs_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python, comet = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "comet"
    run(python, "-m", "pip", "install", "--quiet", *NEEDED_FOR_HELP)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    assert "calibrate" in run(comet, "--help", cwd=tmp_path)
    assert run(comet, "--version", cwd=tmp_path).startswith("comet 0.")
    for command in ("calibrate", "pack", "eval", "bench", "inspect", "doctor"):
        assert "Usage" in run(comet, command, "--help", cwd=tmp_path)
    code = "from comet_core.recipe import load_recipe; print(load_recipe('w4a4kv4').name)"
    assert run(python, "-c", code, cwd=tmp_path) == "w4a4kv4\n"
    code = "from importlib.metadata import entry_points as e; print([p.value for p in e(group='vllm.general_plugins')])"
    assert "comet_core.integrations.vllm:register" in run(python, "-c", code, cwd=tmp_path)
    typed = "COMP_WORDS=(comet pack smollm) COMP_CWORD=2 && _comet_completion comet"
    shell = f'source <(comet --show-completion bash) && {typed} && echo "${{COMPREPLY[@]}}"'
    path = {**os.environ, "PATH": f"{comet.parent}{os.pathsep}{os.environ['PATH']}"}
    assert run("bash", "-c", shell, cwd=tmp_path, env=path).split() == ["smollm2-135m"]
