"""Every kernel compiles for every architecture without a GPU: no spills, no wgmma that the compiler serializes, and
shared memory within the chip's limit.

The default run compiles a sample; `-m slow` compiles every configuration and prints the table of registers.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC (pip install '.[cuda]')")

from comet_cuda import jit
from comet_cuda.dispatch import FAMILIES, arch_of
from comet_cuda.jit import Configuration, Resources
from comet_cuda.kernels import configurations, sources

CAPABILITIES = [capability for family in FAMILIES for capability in family.capabilities]


WGMMA = ("w4ax_gemm_sm90.cu", "w4ax_gemm_integer.cu")  # sources whose products must not be serialized
STATIC_SHARED = 1024  # bytes that a kernel may declare beside what the launcher asks for


def compile_all(work: list[tuple[str, Configuration]]) -> list[tuple[str, Configuration, str, Resources]]:
    def one(item: tuple[str, Configuration]) -> list[tuple[str, Configuration, str, Resources]]:
        arch, configuration = item
        if configuration.source_name in WGMMA:
            reports = unserialized(arch, configuration)
        else:
            reports = configuration.compile(arch).resources
        assert reports, f"{configuration.source_name}: the compiler reported no kernel"
        return [(arch, configuration, entry, resources) for entry, resources in reports.items()]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [row for rows in pool.map(one, work) for row in rows]


def unserialized(arch: str, configuration: Configuration) -> dict[str, Resources]:
    """Compile past the cache, which keeps no log; ptxas says C7510 to C7520 where it serializes wgmma."""
    texts = jit.read_sources(configuration.source_name)
    options = jit._options(arch, configuration.defines, configuration.options)
    log = jit._run_nvrtc(texts, configuration.source_name, options)[1]
    assert "(C75" not in log, f"{dict(configuration.defines)}: {log}"
    return jit.parse_resources(log)


def check(rows: list[tuple[str, Configuration, str, Resources]], limit: int) -> None:
    for arch, configuration, entry, resources in rows:
        name = f"{entry} for {arch} with {dict(configuration.defines)}"
        assert resources.spill_bytes == 0, f"{name} spills {resources.spill_bytes} bytes"
        assert 0 < resources.registers <= 255, name
        used = configuration.shared_bytes + resources.static_shared_bytes
        assert used <= limit, f"{name} takes {used} bytes of shared memory, the chip has {limit}"
        assert resources.static_shared_bytes <= STATIC_SHARED, name


def work_of(capability: tuple[int, int], every: int) -> list[tuple[str, Configuration]]:
    family = next(f for f in FAMILIES if capability in f.capabilities)
    arch = arch_of(capability)
    found = []
    for source in sources():
        found += [(arch, c) for c in configurations(source, family)[::every]]
    return found


def limit_of(capability: tuple[int, int]) -> int:
    return next(f for f in FAMILIES if capability in f.capabilities).shared_kilobytes[capability] * 1024


@pytest.mark.parametrize("capability", CAPABILITIES, ids=arch_of)
def test_a_sample_compiles(capability: tuple[int, int]) -> None:
    check(compile_all(work_of(capability, every=37)), limit_of(capability))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=arch_of)
def test_everything_compiles(capability: tuple[int, int]) -> None:
    rows = compile_all(work_of(capability, every=1))
    print(f"\n{'architecture':13}{'kernel':18}{'registers':>10}{'stack':>7}{'shared':>8}  definitions")
    for arch, configuration, entry, resources in rows:
        shared = configuration.shared_bytes + resources.static_shared_bytes
        defines = " ".join(f"{name}={value}" for name, value in configuration.defines.items())
        print(f"{arch:13}{entry:18}{resources.registers:10}{resources.stack_bytes:7}{shared:8}  {defines}")
    check(rows, limit_of(capability))


@pytest.mark.parametrize(("capability", "portable"), [((8, 0), False), ((8, 6), False), ((8, 9), False)])
def test_int4_blocks_use_int4_tensor_cores(capability: tuple[int, int], portable: bool, tmp_path: Path) -> None:
    """The SASS of the sm_80 GEMM: native INT4 products, and at most three conversion instructions for eight values."""
    code = sass(arch_of(capability), 64, portable, tmp_path)
    int4 = len(re.findall(r"\bIMMA\.16864\.U4\.S4\b", code))
    int8 = len(re.findall(r"\bIMMA\.16832\.U8\.S8\b", code))
    # a warp's 2 m16 tiles x 4 n8 tiles: two steps of 64 channels, or four of 32
    assert (int4, int8) == (2 * 4 * 2, 2 * 4 * 4)
    first, last = code.index("IMMA.16864"), code.rindex("IMMA.16864")
    moves = len(re.findall(r"\b(?:IMAD\.)?MOV(?:\.U32)? ", code[first:last]))
    assert moves <= 8, f"{moves} moves among the INT4 products: fragments should lie in memory as they are multiplied"
    words = 2 * 2 * 4  # of eight nibbles, that a lane widens for an INT8 block
    masks = len(re.findall(r"\bLOP3\.LUT \S+ \S+ 0xf0f0f0f,", code))
    assert 0 < masks <= 2 * words  # one mask a register of four values; the high one shifts first


def test_the_portable_path_uses_int8_tensor_cores_only(tmp_path: Path) -> None:
    code = sass("sm_120", 64, True, tmp_path)
    assert "IMMA.16864" not in code
    assert len(re.findall(r"\bIMMA\.16832\.U8\.S8\b", code)) == 2 * 4 * 4


@pytest.mark.parametrize(
    ("module", "fuses"), [("quantize_row", "012"), ("quantize_few", "02"), ("quantize_token_plan", "02")]
)
def test_no_activation_is_read_before_the_previous_kernel_has_ended(module: str, fuses: str, tmp_path: Path) -> None:
    """Read-only loads (ld.global.nc) were moved up over the wait once: a decode step read what was not there yet.
    The norm of the two others reads its weights before, by the same instruction as x."""
    import importlib

    found = importlib.import_module(f"comet_cuda.{module}").configurations("sm_90")
    for fuse in fuses:
        mine = [one for one in found if str(one.defines["FUSE"]) == fuse]
        for one in mine[:: len(mine) // 3]:
            code = disassembled(one, "sm_90a", tmp_path)
            reads = [
                at.start() for at in re.finditer(r"\bLDG\.E\.NA\b", code)
            ]  # no_allocate: x, and what is added to it
            assert reads and min(reads) > code.index("ACQBULK"), one


def test_no_row_is_copied_before_the_previous_kernel_has_ended(tmp_path: Path) -> None:
    from comet_cuda.quantize_stay import configurations

    found = configurations("sm_90")
    for one in found[:: len(found) // 5]:
        code = disassembled(one, "sm_90a", tmp_path)
        assert code.index("ACQBULK") < code.index("UBLKCP"), one


def test_warps_only_read_what_others_left_behind_the_last_barrier(tmp_path: Path) -> None:
    """Every warp used to write the same maxima over ratios that others were reading: right, but a race."""
    from comet_cuda.quantize_token_plan import configurations

    found = configurations("sm_90")
    for one in found[:: len(found) // 3]:
        code = disassembled(one, "sm_90a", tmp_path)
        barriers = [at.end() for at in re.finditer(r"\b(?:BAR\.SYNC|UCGABAR_WAIT)\b", code)]
        assert barriers and "STS" not in code[barriers[-1] :], one


@pytest.mark.parametrize("source", ["quantize_stay", "quantize_many", "w4ax_gemm_integer", "w4ax_gemm_sm90"])
def test_a_stage_is_given_back_when_its_loads_have_come(source: str, tmp_path: Path) -> None:
    """An arrival does not wait for loads from shared memory. With 12 processes on a GPU a bulk copy overtook them: in
    one launch of 500, INT8 blocks of a token had values of the next. One configuration of each kind is read."""
    family = next(f for f in FAMILIES if f.name == "sm_90")
    kinds = ("CLUSTER", "SPLIT", "BATCH", "FUSE", "GATHER", "SHARE")  # what decides who arrives, and after which loads
    found = configurations(f"{source}.cu", family)
    for one in {tuple(min(2, int(one.defines.get(kind, 1))) for kind in kinds): one for one in found}.values():
        arrivals = 0
        on_their_way: dict[int, str] = {}  # scoreboard -> the load it counts
        for instruction, control in controlled(disassembled(one, "sm_90a", tmp_path, "-hex")):
            counter, waits = control >> 5 & 7, control >> 11 & 63
            on_their_way = {at: load for at, load in on_their_way.items() if not waits >> at & 1}
            operation = instruction.removeprefix(instruction.partition(" ")[0] if instruction[0] == "@" else "").strip()
            if operation.startswith("MEMBAR") or operation == "EXIT":
                on_their_way = {}
            elif operation.startswith("LDS") and counter < 7:
                on_their_way[counter] = instruction
            elif operation.startswith("SYNCS.ARRIVE"):
                arrivals += 1
                assert not on_their_way, (one, instruction, on_their_way)
        assert arrivals > 1, one


def controlled(code: str) -> list[tuple[str, int]]:
    """Instructions of nvdisasm -hex and their control bits, from bit 41 of the second word on: stall (4), yield (1),
    the scoreboard that the result releases (3; 7 is none, a later load's will do), the operands' (3), those waited
    for (6)."""
    found = re.findall(r"/\*[0-9a-f]{4,}\*/ +([^;]+?) *;? +/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/", code)
    return [(instruction, int(word, 16) >> 41) for instruction, word in found]


def sass(arch: str, tokens: int, portable: bool, folder: Path) -> str:
    import torch

    from comet_cuda.w4ax_gemm_sm80 import SOURCE, kernel_defines

    return disassembled(Configuration(SOURCE, kernel_defines(tokens, True, torch.bfloat16, portable)), arch, folder)


def disassembled(configuration: Configuration, arch: str, folder: Path, *options: str) -> str:
    import subprocess

    nvidia = pytest.importorskip("nvidia", reason="needs pip install nvidia-cuda-nvdisasm")
    tools = [tool for root in nvidia.__path__ for tool in Path(root).glob("*/bin/nvdisasm")]
    if not tools:
        pytest.skip("needs pip install nvidia-cuda-nvdisasm")
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(configuration.compile(arch).code)
    return subprocess.run(
        [str(tools[0]), "-c", *options, str(cubin)], capture_output=True, text=True, check=True
    ).stdout
