"""Compiling and caching kernels, without a GPU; which path each GPU takes."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC (pip install '.[cuda]')")

from comet_cuda import jit
from comet_cuda.dispatch import arch_of, paths
from comet_cuda.errors import CometError

KERNEL = """
#include "comet/scale.cuh"
extern "C" __global__ void twice(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= FACTOR + kMore; }
extern "C" __global__ void nothing() {}
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one kernel and one header in place of the package's, and an empty cache."""
    (tmp_path / "include" / "comet").mkdir(parents=True)
    (tmp_path / "twice.cu").write_text(KERNEL)
    (tmp_path / "include" / "comet" / "scale.cuh").write_text("constexpr float kMore = 1.f;\n")
    monkeypatch.setattr(jit, "SOURCE_FOLDER", tmp_path)
    monkeypatch.setattr(jit, "INCLUDE_FOLDER", tmp_path / "include")
    monkeypatch.setenv("COMET_CACHE_DIR", str(tmp_path / "cache"))
    jit._compile_cubin.cache_clear()
    return tmp_path


def compile_again(**defines: int) -> jit.Cubin:
    jit._compile_cubin.cache_clear()
    return jit.compile_cubin("twice.cu", "sm_90a", defines)


def cached(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "kernels").glob("*.cubin"))


def test_a_cubin_is_compiled_once_and_read_afterwards(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_again(FACTOR=1)
    assert set(first.resources) == {"twice", "nothing"} and first.resources["twice"].registers > 0
    assert first.code[:4] == b"\x7fELF" and len(cached(sources)) == 1
    monkeypatch.setattr(jit, "_run_nvrtc", None)  # calling it would raise
    assert compile_again(FACTOR=1) == first


def test_definitions_headers_and_architectures_have_their_own_files(sources: Path) -> None:
    compile_again(FACTOR=1)
    compile_again(FACTOR=2)
    jit.compile_cubin("twice.cu", "sm_80", {"FACTOR": 1})
    (sources / "include" / "comet" / "scale.cuh").write_text("constexpr float kMore = 2.f;\n")
    compile_again(FACTOR=1)
    assert len(cached(sources)) == 4


def test_a_damaged_file_is_compiled_again(sources: Path) -> None:
    first = compile_again(FACTOR=1)
    (path,) = cached(sources)
    good = path.read_bytes()
    for damaged in (b"", good[:-8], good.replace(b"ELF", b"elf"), b"{}\n"):
        path.write_bytes(damaged)
        assert compile_again(FACTOR=1).resources == first.resources
        assert path.read_bytes() == good


def test_a_cache_that_cannot_be_written_costs_only_time(
    sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (sources / "file").write_text("")
    monkeypatch.setenv("COMET_CACHE_DIR", str(sources / "file" / "below"))  # a file where a folder should be
    assert compile_again(FACTOR=1).code
    assert "stays in memory" in caplog.text

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("COMET_CACHE_DIR", str(sources / "cache"))
    monkeypatch.setattr(jit.os, "replace", full)
    assert compile_again(FACTOR=1).code
    assert not cached(sources)
    left = (sources / "cache" / "kernels").iterdir()
    assert not [path for path in left if path.suffix != ".lock"]  # no half-written file left


def test_a_source_that_does_not_compile_is_explained(sources: Path) -> None:
    with pytest.raises(CometError, match="FACTOR"):
        compile_again()
    with pytest.raises(CometError, match="sm_1"):
        jit.compile_cubin("twice.cu", "sm_1", {"FACTOR": 1})


def test_processes_share_one_cache(tmp_path: Path) -> None:
    program = (
        "import os, sys; os.environ['COMET_CACHE_DIR'] = sys.argv[1]\n"
        "from comet_cuda.jit import compile_cubin; from comet_cuda.w4ax_gemm_sm80 import kernel_defines\n"
        "import torch; print(len(compile_cubin('w4ax_gemm_sm80.cu', 'sm_80',"
        " kernel_defines(8, True, torch.bfloat16, False)).code))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    folder = str(Path(__file__).parents[2] / "cuda")
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": folder}) for _ in range(2)]
    sizes = {process.communicate(timeout=120)[0] for process in running}
    assert len(sizes) == 1 and int(sizes.pop()) > 0
    assert len(list(tmp_path.rglob("*.cubin"))) == 1


def test_no_driver_is_one_clear_error(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from comet_cuda import driver

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    driver.driver_library.cache_clear()
    with pytest.raises(CometError, match="NVIDIA driver"):
        jit.compile_kernel("twice.cu", "twice", "sm_90a", {"FACTOR": 1}).load(0)
    driver.driver_library.cache_clear()


@pytest.mark.parametrize(
    ("capability", "arch", "gemm"),
    [
        ((8, 0), "sm_80", "sm_80"),
        ((8, 6), "sm_86", "sm_80"),
        ((8, 7), "sm_86", "sm_80"),  # Orin runs code of the nearest older minor version
        ((8, 9), "sm_89", "sm_80"),
        ((9, 0), "sm_90a", "sm_90"),
        ((10, 0), "sm_100", "portable"),
        ((10, 3), "sm_100", "portable"),
        ((12, 0), "sm_120", "portable"),
    ],
)
def test_paths(capability: tuple[int, int], arch: str, gemm: str) -> None:
    assert arch_of(capability) == arch
    found = {op: path for op, path, reason in paths(capability) if reason}
    assert found["w4ax_gemm"] == gemm and found["quantize_act"] == arch
    assert set(found) == {"quantize_act", "w4ax_gemm", "kv4_append", "kv4_decode", "kv4_prefill"}
    integer = {op: path for op, path, reason in paths(capability, integer=True) if reason}
    assert integer == found and ("one a token" in paths(capability, integer=True)[0][2])


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_old_gpus_are_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(CometError, match=r"8\.0 or later"):
        paths(capability)
