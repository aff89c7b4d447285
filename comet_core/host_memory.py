"""The memory of this process: how much it held at most, and a heap that gives back what is freed.

By default the C library keeps freed blocks of up to 32 MiB for later, scattered as they are, so that a process holds
up to twice of what the program does and nobody can say beforehand how much. `give_back_freed` makes every block from
4 MiB up a mapping of its own, which goes back at once, and lets torch ask for large pages, which makes mappings cheap:
results/LOG.md has the figures. A C library other than glibc ignores it.
"""

import contextlib
import ctypes
import os
from pathlib import Path

M_MMAP_THRESHOLD = -3  # mallopt's name for it in glibc's malloc.h
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroups 2 and 1
OWN_MAPPING = 4 << 20  # bytes; smaller blocks are reused from the heap


def give_back_freed() -> None:
    """Set the heap up. Called by commands that hold tensors, before torch has allocated any."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it at its first allocation
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, OWN_MAPPING)


def trim() -> None:
    """Give back what lies free in the heap now: small blocks, after a layer."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def total_memory() -> int:
    """Bytes of RAM that this process may have: the machine's, or fewer where a container limits them."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such limit, or the word "max"
            found = min(found, int(Path(limit).read_text()))
    return found


def free_memory() -> int:
    """Bytes of RAM that are free, caches of files included (Linux drops those); at most `total_memory`."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        return min(1024 * int(available.split()[1]), total_memory())
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"), total_memory())


def peak_memory() -> int:
    """The largest size this process had since `forget_peak`, in bytes (0 where Linux's /proc is not there)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def forget_peak() -> int:
    """Start a new peak; returns what the process holds now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return peak_memory()
