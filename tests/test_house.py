"""The rules of the house, read from the source: which way imports run, and how long a file may be."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = {
    "comet_cuda": ROOT / "cuda",
    "comet_core": ROOT,
    "comet_cli": ROOT / "cli",
}  # may import itself and those before
ORDER = (  # inside comet_core: each file may import only those before it
    "progress", "host_memory", "whole_files", "provenance", "results", "recipe_rules", "recipe", "model_cache",
    "safetensors_files", "experts", "weight_reader", "quantized_source", "gguf_tokenizer", "gguf_folder",
    "model_source", "text_files", "corpus", "hidden", "kv_cache", "decoder", "lanes", "layer_check", "layer_times",
    "observe", "outliers", "plan", "edited_source", "folding", "smooth", "rotate",
    "rotate_model", "learned_clip", "transform", "calibration", "calibrate", "replay", "quantize", "descent", "linear",
    "moments", "windows", "quantize_group", "shards", "packed", "inspection", "model_card", "ledger",
    "finished", "scores", "tune",
    "pack_job", "pack", "preflight", "llama_shape", "serving_scheme", "roofline", "paged_cache", "fused_linear",
    "runner_model", "runner_weights", "runner", "layer_text", "step_breakdown", "device_timing", "bench_vllm",
    "bench_peers", "bench_kernel", "bench_attention", "bench_plots", "report", "bench_serving", "reproduce_speed",
    "serving_report",
    "evaluate", "rounded_once", "real_text", "screen", "bench", "kv_open_page", "zero_shot_tasks", "zero_shot_store",
    "zero_shot", "preflight_eval", "zero_shot_table", "headline", "tables", "paper_table", "reproduce",
    "reproduce_report", "bits_plot",
)  # fmt: skip
MOST_LINES, MOST_LINES_KERNEL_OR_TEST = 400, 500


def sources(package: str) -> list[Path]:
    found = sorted((LAYERS[package] / package).rglob("*.py"))
    assert found, f"{package} has no files: the test looks in the wrong place"
    return found


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, absolute, with `from a import b` as a.b."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", LAYERS)
def test_packages_import_one_way(package: str) -> None:
    names = list(LAYERS)
    later = names[names.index(package) + 1 :]
    wrong = [f"{file}: {name}" for file in sources(package) for name in imports(file) if name.split(".")[0] in later]
    assert not wrong


def test_comet_core_files_import_only_those_above() -> None:
    wrong = []
    for file in (ROOT / "comet_core").glob("*.py"):
        used = {name.split(".")[1] for name in imports(file) if name.startswith("comet_core.")}
        if file.stem != "__init__":
            assert file.stem in ORDER, f"{file.name} has no place in ORDER"
            wrong += [f"{file.stem} imports {name}" for name in used if name not in ORDER[: ORDER.index(file.stem)]]
    assert not wrong


def test_cuda_is_no_package() -> None:
    assert (ROOT / "cuda" / "comet_cuda" / "__init__.py").exists()
    assert not (ROOT / "cuda" / "__init__.py").exists(), "it would shadow NVIDIA's cuda namespace"
    assert not (ROOT / "cli" / "__init__.py").exists()


def test_files_are_read_in_one_sitting() -> None:
    roots = [ROOT / name for name in ("cli", "comet_core", "cuda", "tests")]
    files = [file for root in roots for end in ("py", "cu", "cuh") for file in root.rglob(f"*.{end}")]
    assert len(files) > 20
    long = {}
    for file in files:
        product = file.suffix == ".py" and "tests" not in file.relative_to(ROOT).parts
        if (count := len(file.read_text().splitlines())) > (MOST_LINES if product else MOST_LINES_KERNEL_OR_TEST):
            long[str(file.relative_to(ROOT))] = count
    assert not long


@pytest.mark.parametrize("package", LAYERS)
def test_every_module_says_what_it_is(package: str) -> None:
    wordless = [str(file) for file in sources(package) if not ast.get_docstring(ast.parse(file.read_text()))]
    assert not wordless


def test_a_wheel_holds_every_package_folder() -> None:
    """A new sub-package or data file type must be named in pyproject.toml, or an installed comet lacks it."""
    import tomllib

    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package, root in LAYERS.items():
        for file in (root / package).rglob("*"):
            if file.suffix == ".pyc" or not file.is_file():
                continue
            folder = file.relative_to(root).parent
            if file.suffix == ".py":
                assert ".".join(folder.parts) in setuptools["packages"], f"{file} is not packaged"
                continue
            inside = file.relative_to(root / package)
            assert any(inside.match(one) for one in setuptools["package-data"][package]), f"{file} is not packaged"
