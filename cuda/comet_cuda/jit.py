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

SOURCE_FOLDER = Path(__file__).parent
INCLUDE_FOLDER = SOURCE_FOLDER / "include"
FORMAT = "comet-cubin-1"  # first word of a cache file: one line of JSON, then the cubin
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
    """Machine code of one entry for one architecture."""

    entry: str
    arch: str
    code: bytes
    resources: Resources


def cache_folder() -> Path:
    """$COMET_CACHE, or ~/.cache/comet/kernels."""
    return Path(os.environ.get("COMET_CACHE") or Path.home() / ".cache" / "comet" / "kernels")


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
def compiler_version() -> str:
    """NVRTC's version, "13.0"."""
    status, major, minor = _nvrtc().nvrtcVersion()
    if int(status):
        raise CometError(f"NVRTC does not say its version: {status}")
    return f"{major}.{minor}"


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
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--ptxas-options=-v",
        *options,
        *(f"-D{name}={value}" for name, value in sorted(defines.items())),
    ]


def _key(texts: Mapping[str, str], entry: str, options: Sequence[str]) -> str:
    parts = [FORMAT, compiler_version(), entry, *options]
    parts += [part for name in sorted(texts) for part in (name, texts[name])]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def parse_resources(log: str, entry: str) -> Resources:
    """Read the assembler's `-v` report of `entry` out of the compiler's log."""
    report = log[log.index(f"'{entry}'") :]

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found.group(1)) if found else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        static_shared_bytes=number(r"(\d+) bytes smem"),
    )


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
            raise CometError(
                f"{source_name} does not compile with {' '.join(options)} (NVRTC {compiler_version()}):\n{text}",
                "update the driver and NVRTC if the architecture is newer than they are",
            )
        code = bytes(nvrtc.nvrtcGetCUBINSize(program)[1])
        nvrtc.nvrtcGetCUBIN(program, code)
        return code, text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(path: Path, entry: str, arch: str) -> Cubin | None:
    """The cubin in a cache file; None where there is none, or a damaged one."""
    try:
        header, code = path.read_bytes().split(b"\n", 1)
        described = json.loads(header)
        if described["format"] != FORMAT or described["sha256"] != hashlib.sha256(code).hexdigest():
            return None
        return Cubin(entry, arch, code, Resources(**described["resources"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, cubin: Cubin) -> None:
    header = {
        "format": FORMAT,
        "entry": cubin.entry,
        "arch": cubin.arch,
        "sha256": hashlib.sha256(cubin.code).hexdigest(),
        "resources": dataclasses.asdict(cubin.resources),
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


def compile_cubin(
    source_name: str,
    entry: str,
    arch: str,
    defines: Mapping[str, int | str] | None = None,
    options: Sequence[str] = (),
) -> Cubin:
    """Compile one entry, or read it from the cache. Needs no GPU; arguments as in `compile_kernel`."""
    texts = read_sources(source_name)
    flags = _options(arch, defines or {}, options)
    path = cache_folder() / f"{entry}-{arch}-{_key(texts, entry, flags)}.cubin"
    cached = _read(path, entry, arch)
    if cached is not None:
        return cached
    with _lock(path):
        cached = _read(path, entry, arch)
        if cached is not None:
            return cached
        code, log = _run_nvrtc(texts, source_name, flags)
        cubin = Cubin(entry, arch, code, parse_resources(log, entry))
        try:
            _write(path, cubin)
        except OSError as error:
            _log.warning("kernel cache %s cannot be written (%s): %s stays in memory", path.parent, error, entry)
        return cubin


class CompiledKernel:
    """A compiled entry; loads itself on each GPU at the first launch there."""

    def __init__(self, cubin: Cubin) -> None:
        self.cubin = cubin
        self.resources = cubin.resources
        self._loaded: dict[int, LoadedKernel] = {}
        self._lock = threading.Lock()

    def load(self, device: int) -> LoadedKernel:
        """The kernel on GPU `device`, loaded once."""
        with self._lock:
            if device not in self._loaded:
                self._loaded[device] = LoadedKernel(self.cubin.code, self.cubin.entry, device)
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
        device = torch.cuda.current_device()
        loaded = self._loaded.get(device) or self.load(device)
        loaded.launch(grid, block, args, shared_bytes, pdl)

    def launch_on(
        self, device: int, grid: Dim, block: Dim, args: Sequence[Any], shared_bytes: int = 0, pdl: bool = False
    ) -> None:
        """`launch` on GPU `device`, which need not be torch's current one."""
        if device == torch.cuda.current_device():
            self.launch(grid, block, args, shared_bytes, pdl)
            return
        with torch.cuda.device(device):
            self.launch(grid, block, args, shared_bytes, pdl)


@functools.cache
def _compile_kernel(
    source_name: str, entry: str, arch: str, defines: tuple[tuple[str, int | str], ...], options: tuple[str, ...]
) -> CompiledKernel:
    return CompiledKernel(compile_cubin(source_name, entry, arch, dict(defines), options))


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
