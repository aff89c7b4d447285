"""CUDA source -> cubin -> launch: kernels are compiled by NVRTC at first use and kept in a cache on disk.

In: the name of a .cu file of this package, one `extern "C"` entry, an exact architecture ("sm_90a") and preprocessor
definitions. Out: a `CompiledKernel`, which also says what the assembler reported (registers, spills, shared memory).
Compiling needs no GPU. The cache key hashes the source, every header of ours that it includes, the options and the
compiler's version; a file is written beside its place and renamed, one process at a time per key; a folder that
cannot be written (read-only, full) costs only that the next process compiles the kernel again.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from comet_cuda.driver import Dim, LoadedKernel
from comet_cuda.errors import CometError
from comet_cuda.folders import cache_dir

SOURCE_FOLDER = Path(__file__).parent
INCLUDE_FOLDER = SOURCE_FOLDER / "include"
FORMAT = "comet-cubin-2"  # first word of a cache file: one line of JSON, then the cubin
LOCK_SECONDS = 300.0  # a compiling process is waited for this long, then we compile too

_log = logging.getLogger(__name__)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Resources:
    """What the assembler says one kernel takes."""

    registers: int  # a thread
    spill_bytes: int  # a thread, stores and loads
    stack_bytes: int  # a thread, local memory
    static_shared_bytes: int  # a cta, without the dynamic part given at launch


@dataclasses.dataclass(frozen=True)
class Cubin:
    """Machine code of one source for one architecture, with all its entries."""

    arch: str
    code: bytes
    resources: Mapping[str, Resources]  # of each entry, as far as the compiler reported them


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way a source is compiled, and the dynamic shared memory it is launched with at most."""

    source_name: str
    defines: Mapping[str, int | str]
    options: tuple[str, ...] = ()
    shared_bytes: int = 0

    def compile(self, arch: str) -> "Cubin":
        """Compile it for `arch`, or find it in the cache."""
        return compile_cubin(self.source_name, arch, self.defines, self.options)


def cache_folder() -> Path:
    """Where cubins are kept."""
    return cache_dir() / "kernels"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc  # type: ignore[import-untyped,unused-ignore]

        nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise CometError(
            f"NVRTC, the CUDA run-time compiler, cannot be loaded: {error}",
            "pip install 'cuda-bindings' 'nvidia-cuda-nvrtc' (torch's CUDA builds bring the latter)",
        ) from error
    return nvrtc


@functools.cache
def compiler_version() -> tuple[int, int]:
    """NVRTC's version, such as (13, 0)."""
    status, major, minor = _nvrtc().nvrtcVersion()
    if int(status):
        raise CometError(f"NVRTC does not say its version: {status}")
    return major, minor


def read_sources(source_name: str) -> dict[str, str]:
    """The source and every header of ours that it includes, directly or not: name -> text, the source first."""
    texts = {source_name: (SOURCE_FOLDER / source_name).read_text()}
    waiting = [source_name]
    while waiting:
        for header in _INCLUDE.findall(texts[waiting.pop()]):
            if header not in texts:
                texts[header] = (INCLUDE_FOLDER / header).read_text()
                waiting.append(header)
    return texts


def _options(arch: str, defines: Mapping[str, int | str], options: Sequence[str]) -> list[str]:
    own_cache = ["--no-cache"] if compiler_version() >= (13, 0) else []  # NVRTC's returns no report of resources
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--ptxas-options=-v",
        *own_cache,
        *options,
        *(f"-D{name}={value}" for name, value in sorted(defines.items())),
    ]


def _key(texts: Mapping[str, str], options: Sequence[str]) -> str:
    parts = [FORMAT, str(compiler_version()), *options]
    parts += [part for name in sorted(texts) for part in (name, texts[name])]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def parse_resources(log: str) -> dict[str, Resources]:
    """Read the assembler's `-v` report out of the compiler's log: entry -> what it takes."""
    found: dict[str, Resources] = {}
    for report in log.split("Compiling entry function '")[1:]:

        def number(pattern: str, report: str = report) -> int:
            match = re.search(pattern, report)
            return int(match.group(1)) if match else 0

        found[report.split("'", 1)[0]] = Resources(
            registers=number(r"Used (\d+) registers"),
            spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            stack_bytes=number(r"(\d+) bytes stack frame"),
            static_shared_bytes=number(r"(\d+) bytes smem"),
        )
    return found


def _run_nvrtc(texts: Mapping[str, str], source_name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Source and headers -> (cubin, log). Raises CometError with the log when the source does not compile."""
    nvrtc = _nvrtc()
    headers = [name for name in texts if name != source_name]
    status, program = nvrtc.nvrtcCreateProgram(
        texts[source_name].encode(),
        source_name.encode(),
        len(headers),
        [texts[name].encode() for name in headers],
        [name.encode() for name in headers],
    )
    if int(status):
        raise CometError(f"NVRTC does not accept {source_name}: {status}")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])  # the bindings write into bytes objects
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.rstrip(b"\0").decode(errors="replace")
        if int(status):
            major, minor = compiler_version()
            raise CometError(
                f"{source_name} does not compile with {' '.join(options)} (NVRTC {major}.{minor}):\n{text}",
                "update the driver and NVRTC if the architecture is newer than they are",
            )
        code = bytes(nvrtc.nvrtcGetCUBINSize(program)[1])
        nvrtc.nvrtcGetCUBIN(program, code)
        return code, text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(path: Path, arch: str) -> Cubin | None:
    """The cubin in a cache file; None where there is none, or a damaged one."""
    try:
        header, code = path.read_bytes().split(b"\n", 1)
        described = json.loads(header)
        if described["format"] != FORMAT or described["sha256"] != hashlib.sha256(code).hexdigest():
            return None
        resources = {entry: Resources(**numbers) for entry, numbers in described["resources"].items()}
        return Cubin(arch, code, resources)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, cubin: Cubin) -> None:
    header = {
        "format": FORMAT,
        "arch": cubin.arch,
        "sha256": hashlib.sha256(cubin.code).hexdigest(),
        "resources": {entry: dataclasses.asdict(numbers) for entry, numbers in cubin.resources.items()},
    }
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(json.dumps(header).encode() + b"\n" + cubin.code)
            file.flush()
            os.chmod(file.name, 0o644)  # a cache may be shared between users
            os.replace(file.name, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time per key; no lock where the folder does not allow one."""
    import filelock

    lock = filelock.FileLock(str(path) + ".lock", timeout=LOCK_SECONDS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError, filelock.Timeout) as error:
        _log.info("kernel cache %s is not lockable: %s", path.parent, error)
        yield
        return
    try:
        yield
    finally:
        lock.release()


@functools.cache
def _compile_cubin(
    source_name: str, arch: str, defines: tuple[tuple[str, int | str], ...], options: tuple[str, ...]
) -> Cubin:
    texts = read_sources(source_name)
    flags = _options(arch, dict(defines), options)
    path = cache_folder() / f"{Path(source_name).stem}-{arch}-{_key(texts, flags)}.cubin"
    cached = _read(path, arch)
    if cached is not None:
        return cached
    with _lock(path):
        cached = _read(path, arch)
        if cached is not None:
            return cached
        code, log = _run_nvrtc(texts, source_name, flags)
        cubin = Cubin(arch, code, parse_resources(log))
        try:
            _write(path, cubin)
        except OSError as error:
            _log.warning("kernel cache %s cannot be written (%s): %s stays in memory", path.parent, error, source_name)
        return cubin


def compile_cubin(
    source_name: str, arch: str, defines: Mapping[str, int | str] | None = None, options: Sequence[str] = ()
) -> Cubin:
    """Compile one source, or read it from the cache. Needs no GPU; arguments as in `compile_kernel`."""
    return _compile_cubin(source_name, arch, tuple(sorted((defines or {}).items())), tuple(options))


class CompiledKernel:
    """A compiled entry; loads itself on each GPU at the first launch there."""

    def __init__(self, cubin: Cubin, entry: str) -> None:
        self.cubin = cubin
        self.entry = entry
        self.resources = cubin.resources.get(entry)  # None where the compiler reported nothing
        self._loaded: dict[int, LoadedKernel] = {}
        self._lock = threading.Lock()

    def load(self, device: int) -> LoadedKernel:
        """The kernel on GPU `device`, loaded once."""
        with self._lock:
            if device not in self._loaded:
                self._loaded[device] = LoadedKernel(self.cubin.code, self.entry, device)
            return self._loaded[device]

    def launch(self, grid: Dim, block: Dim, args: Sequence[Any], shared_bytes: int = 0, pdl: bool = False) -> None:
        """Launch on the current stream of torch's current device.

        Args:
            grid: ctas, an int or up to three of them.
            block: threads a cta, likewise.
            args: the kernel's parameters in order: tensors (their data pointer), None (a null pointer), ints, floats
                for float parameters, bytes for structs. A parameter keeps its kind from launch to launch.
            shared_bytes: dynamic shared memory; above 48 KB the kernel's limit is raised.
            pdl: allow this kernel to start before the previous one in the stream ends (programmatic dependent launch,
                sm_90 and later); the kernel must then wait (griddepcontrol.wait) before it reads what that one wrote.
        """
        device = torch._C._cuda_getDevice()
        loaded = self._loaded.get(device) or self.load(device)
        loaded.launch(grid, block, args, shared_bytes, pdl)

    def launch_on(
        self, device: int, grid: Dim, block: Dim, args: Sequence[Any], shared_bytes: int = 0, pdl: bool = False
    ) -> None:
        """`launch` on GPU `device`, which need not be torch's current one."""
        if device == torch._C._cuda_getDevice():
            loaded = self._loaded.get(device) or self.load(device)
            loaded.launch(grid, block, args, shared_bytes, pdl)
            return
        with torch.cuda.device(device):
            self.launch(grid, block, args, shared_bytes, pdl)


@functools.cache
def _compile_kernel(
    source_name: str, entry: str, arch: str, defines: tuple[tuple[str, int | str], ...], options: tuple[str, ...]
) -> CompiledKernel:
    return CompiledKernel(_compile_cubin(source_name, arch, defines, options), entry)


def compile_kernel(
    source_name: str,
    entry: str,
    arch: str,
    defines: Mapping[str, int | str] | None = None,
    options: Sequence[str] = (),
) -> CompiledKernel:
    """Compile one entry of one source, or find it in the cache; the same arguments give the same object.

    Args:
        source_name: a .cu file in this package's folder, such as "w4ax_gemm_sm90.cu". It includes our headers as
            `#include "comet/name.cuh"` and no header of CUDA's.
        entry: name of an `extern "C" __global__` function in it.
        arch: exact architecture, "sm_80", "sm_90a", ...
        defines: preprocessor definitions, name -> value.
        options: further NVRTC options, such as "-fmad=false".

    Returns:
        The kernel, not yet loaded on any GPU.
    """
    return _compile_kernel(source_name, entry, arch, tuple(sorted((defines or {}).items())), tuple(options))
