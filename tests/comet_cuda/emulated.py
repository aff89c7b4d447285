"""Kernels of comet_cuda run on a CPU: the source, compiled by g++ behind emulator.h, in the place of a compiled cubin.

For tests where there is no GPU: `emulate(monkeypatch)` replaces compilation in the launchers' modules, so that their
own code packs parameters and chooses grids. Slow (a microsecond a warp-wide instruction): tiny shapes only.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from comet_cuda import gptq_block, kv4_append_cuda, kv4_decode_cuda, kv4_prefill_cuda
from comet_cuda.jit import SOURCE_FOLDER, read_sources

HERE = Path(__file__).parent
REPLACED = ("comet/kv4_ptx.cuh", "comet/async_copy.cuh")  # by emulator_ptx.h
SHARED = 256 << 10  # bytes
RUN = """
alignas(128) char memory[{shared}];
static void call(const void* p) {{ {entry}(*static_cast<const Params*>(p)); }}
extern "C" void run(int gx, int gy, int gz, int threads, const void* p) {{
  emulator::kernel = call, emulator::parameters = p, emulator::grid_size = {{gx, gy, gz}};
  for (int z = gz; z-- > 0;)  // the last cta first: on a GPU none may rely on those before it
    for (int y = gy; y-- > 0;)
      for (int x = gx; x-- > 0;) {{
        for (unsigned i = 0; i < sizeof memory; i += 4) *reinterpret_cast<unsigned*>(memory + i) = 0x7FC07FC0u; // NaNs
        emulator::block_index = {{x, y, z}};
        emulator::run_cta(threads);
      }}
}}
"""


def expanded(source: str, defines: Mapping[str, int | str]) -> str:
    """A source or header with its headers in front of it, as C++ for this machine."""
    texts = read_sources(source)
    done: set[str] = set()

    def expand(name: str) -> str:
        if name in done:
            return ""
        done.add(name)
        if name in REPLACED:
            return '#include "emulator_ptx.h"\n'
        return re.sub(r'^#include "([^"]+)"$', lambda match: expand(match.group(1)), texts[name], flags=re.MULTILINE)

    body = expand(source).replace("#pragma once", "").replace("#pragma unroll", "//")
    body = re.sub(r"extern __shared__ __align__\(\d+\) char memory\[\];", "extern char memory[];", body)
    body = body.replace('extern "C" __global__', "__global__")
    return "\n".join([*(f"#define {name} {value}" for name, value in defines.items()), '#include "emulator.h"', body])


def compiled(folder: Path, text: str) -> ctypes.CDLL:
    """The shared library that g++ makes of it, once a text."""
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    library, file = folder / f"{name}.so", folder / f"{name}.cpp"
    if not library.exists():
        file.write_text(text)
        command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-w"]
        done = subprocess.run(
            [*command, f"-I{HERE}", str(file), "-o", str(library)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(library))


class EmulatedKernel:
    """Stands for a CompiledKernel."""

    def __init__(self, folder: Path, source: str, entry: str, defines: Mapping[str, int | str]) -> None:
        text = expanded(source, defines) + RUN.format(shared=SHARED, entry=entry)
        self._run = compiled(folder, text).run

    def launch_on(
        self, device: int, grid: Any, block: int, args: Sequence[bytes], shared_bytes: int = 0, pdl: bool = False
    ) -> None:
        """All ctas, one after the other, the last first."""
        assert shared_bytes <= SHARED
        self._run(*((*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]), block, args[0])


_kernels: dict[tuple[object, ...], EmulatedKernel] = {}


def emulate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From here on, the launchers of the KV4 kernels and of gptq_block run on CPU tensors."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    assert SOURCE_FOLDER.exists()

    def compile_kernel(
        source: str, entry: str, arch: str, defines: Mapping[str, int | str], options: Sequence[str] = ()
    ) -> EmulatedKernel:
        key = (folder, source, entry, *sorted(defines.items()))
        if key not in _kernels:
            _kernels[key] = EmulatedKernel(folder, source, entry, defines)
        return _kernels[key]

    class Properties:
        multi_processor_count = 4

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gptq_block, "compile_kernel", compile_kernel)
    monkeypatch.setattr(gptq_block, "device_arch", lambda _: "emulated")
    for module, cached in (
        (kv4_append_cuda, "_append_kernel"),
        (kv4_decode_cuda, "_decode_kernel"),
        (kv4_prefill_cuda, "_prefill_kernel"),
    ):
        monkeypatch.setattr(module, "compile_kernel", compile_kernel)
        monkeypatch.setattr(module, "device_arch", lambda _: "emulated")
        monkeypatch.setattr(module, "device_capability", lambda _: (8, 0))
        monkeypatch.setattr(module, cached, getattr(module, cached).__wrapped__)  # nothing is remembered
