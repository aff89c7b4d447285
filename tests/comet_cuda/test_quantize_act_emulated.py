"""The quantize_*.cu kernels, compiled by g++ and run on the CPU (cuda_on_cpu.h), equal the reference.

Slow and without timing, but it runs where there is no GPU, and it makes the hardware's approximate reciprocal as wrong
as it may be.
"""

import ctypes
import itertools
import platform
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from comet_cuda import quantize_act_cuda, quantize_few, quantize_many, quantize_row, quantize_stay, quantize_token_plan
from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.jit import read_sources
from comet_cuda.quantize_act import TOKEN, quantize_act_ref
from comet_cuda.quantize_fused import rms_norm_quantize_ref, silu_mul_quantize_ref
from comet_cuda.weight_layout import untile_activations_sm90

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)
HERE = Path(__file__).parent
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-mfma", "-mf16c", "-fPIC", "-shared", "-w", "-fno-strict-aliasing"]
PAIR = r'asm\("\{{\.reg \.b32.*?: "=h"\({0}\).*?"r"\((low|high)\).*?\);'
SCALED = "emu::e4m3_pair(emu::mul_pair(emu::fma_pair({}, 0x78007800u, 0xA300A300u), 0x60006000u))"
PTX = (  # statement of the kernel -> what it means
    (r'asm volatile\("" : .*?\);', ""),
    (r'asm\("cvt\.rn\.bf16x2\.f32.*?\);', "pair = emu::bf16(low) | emu::bf16(high) << 16;"),
    (r'asm\("cvt\.f32\.f16.*?bits\)\)\);', "x = float(emu::half(bits));"),
    (
        r'asm\("cvt\.rn\.f16x2\.f32 %0, %1, %2;" : "=r"\(pair\) : "f"\(high\), "f"\(low\)\);',
        "pair = emu::hbits(_Float16(low)) | emu::hbits(_Float16(high)) << 16;",
    ),
    (r'asm\("ex2\.approx.*?"f"\((.*?)\)\);', r"power = exp2f(\1);"),
    (r'asm\("rcp\.approx\.ftz\.f32 %0, %1;" : "=f"\(inverse\).*?\);', "inverse = emu::reciprocal(1.f + power);"),
    (r'asm volatile\("ld\.global\.L1::no_allocate\.v\d.*?"l"\(p\)\s*: "memory"\);', "v = *p;"),
    (r'asm\("dp2a\.lo\S+ %0, %1, 512.*?\);', "input += 2 * (two >> 16);"),
    (r'asm\("dp2a\.lo\S+ %0, %1, %2.*?\);', "input += (FAR ? 2 : 1) * (two & 0xFFFFu);"),
    (r'asm\("dp2a\.lo.*?\);', "x += two & 0xFFFFu;"),
    (r'asm volatile\("st\.global\.v2.*?\);', "((uint32_t*)p)[0] = low, ((uint32_t*)p)[1] = high;"),
    (r'asm volatile\("st\.global\.v4.*?\);', "if ((size_t)p % 16) abort(); *(uint4*)p = data;"),
    (r'asm volatile\("st\.global\.u32.*?\);', "*(uint32_t*)p = data;"),
    (r'asm volatile\("griddepcontrol.*?\);', ""),
    (r'asm\("rcp.approx.*?\);', "r = emu::reciprocal(x);"),
    (r'asm\("min\.f16x2.*?\);', "a = emu::minp(a, b);"),
    (r'asm\("max\.f16x2.*?\);', "a = emu::maxp(a, b);"),
    (
        r'asm\("cvt\.rn\.f16x2\.f32.*?q\[0\]\)\);',
        "pair = emu::hbits(_Float16(q[0])) | emu::hbits(_Float16(q[1])) << 16;",
    ),
    (r'asm\("add\.rn\.f16x2.*?\);', "pair = emu::add_pair(pair, 0x66006600u);"),
    (PAIR.format("a"), f"a = {SCALED.format('low')};"),
    (PAIR.format("b"), f"b = {SCALED.format('high')};"),
    (r'asm\("cvt\.rn\.satfinite\.e4m3x2\.f32.*?\);', "bytes = emu::e4m3_pair(low, high);"),
    (r"extern __shared__ __align__\(\d+\) char shared\[\];", "char* const shared = emu::now->cta->memory;"),
    (r"__shared__", "static"),
)
KERNELS = {
    "quantize_act": quantize_act_cuda.SOURCE, "quantize_few": quantize_few.SOURCE,
    "quantize_many": quantize_many.SOURCE, "quantize_row": quantize_row.SOURCE,
    "quantize_stay": quantize_stay.SOURCE, "quantize_token": quantize_token_plan.SOURCE,
}  # fmt: skip


def plain_source(entry: str) -> str:
    """The kernel and its headers as one C++ text."""
    texts, done = read_sources(KERNELS[entry]), {"comet/pipeline.cuh", "comet/cluster.cuh"}  # emulated in other words

    def expanded(name: str) -> str:
        if name in done:
            return ""
        done.add(name)
        return re.sub(r'^#include "(.*)".*$', lambda found: expanded(found[1]), texts[name], flags=re.MULTILINE)

    lines = expanded(KERNELS[entry]).splitlines()
    text = "\n".join(line for line in lines if not re.match(r"\s*#\s*pragma", line))
    for pattern, meaning in PTX:
        text, count = re.subn(pattern, meaning, text, flags=re.DOTALL)
        assert count or "volatile" in pattern or "static" in meaning or "dp2a" in pattern, (
            f"{pattern} is not in the kernel"
        )
    assert "asm" not in re.sub(r"//.*", "", text), "PTX that the emulation does not know"
    header = f'#include "{HERE / "cuda_on_cpu.h"}"\n#define ENTRY {entry}\n'
    return f"{header}{text}\n#define AFTER_THE_KERNEL\n{header}"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """definitions -> the compiled kernel."""
    folder, found = tmp_path_factory.mktemp("emulated"), {}

    def compiled(entry: str, defines: dict[str, int | str]) -> ctypes.CDLL:
        key = entry + str(sorted(defines.items()))
        if key not in found:
            source, library = folder / f"{len(found)}.cpp", folder / f"{len(found)}.so"
            source.write_text(plain_source(entry))
            flags = [f"-D{name}={value}" for name, value in defines.items()]
            subprocess.run(["g++", *FLAGS, *flags, str(source), "-o", str(library)], check=True)
            found[key] = ctypes.CDLL(str(library))
        return found[key]

    return compiled


def aligned(tensor: Tensor) -> Tensor:
    """A copy whose address is a multiple of 1,024, like that of a GPU's allocator."""
    size = tensor.numel() * tensor.element_size()
    raw = torch.zeros(size + 1024, dtype=torch.uint8)
    start = -raw.data_ptr() % 1024
    copy = raw[start : start + size].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def run(build, x: Tensor, common: tuple, layout: str, share: int, tokens: int, **how) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """codes and meta (and the summed residual) as the kernel leaves them; common: perm, bits, clip, hadamard.

    tokens: a cta's of quantize_act.cu; 0 takes quantize_few.cu, -1 quantize_many.cu, share TOKEN quantize_token.cu.
    """
    perm, bits, clip, hadamard = common
    fuse, threads, stage = how.get("fuse", "none"), how.get("threads", 256), how.get("stage", True)
    rows, channels = x.shape[0], x.shape[1] // (2 if fuse == "silu_mul" else 1)
    blocks, vector = num_blocks(channels), channels % 4 == 0
    splits, entry, shared_bytes = how.get("splits", 1), "quantize_act", 227 * 1024
    covered = -(-rows // 8) * 8 if layout == "sm_90" else rows
    shape, gathered = (rows, channels, x.dtype), perm is not None
    if share == TOKEN:
        token = quantize_token_plan.plan_plain(*shape[:2], fuse, gathered, vector, how.get("sms", 1), 227 * 1024)
        defines = token.defines(x.dtype, hadamard, fuse, quantize_act_cuda.LAYOUTS[layout])
        threads, tokens, entry, shared_bytes = 32 * token.warps, 1, "quantize_token", token.shared_bytes
    elif tokens > 0:
        defines = quantize_act_cuda.kernel_defines(x.dtype, tokens, hadamard, fuse, layout, vector, stage, threads)
    elif tokens < 0:
        many = quantize_many.plan_many(*shape, fuse, layout, share, gathered, how.get("sms", 1), 227 * 1024)
        assert many is not None
        defines = quantize_many.many_defines(x.dtype, hadamard, fuse)
        splits, threads, tokens, entry, covered = many.splits, 32 * many.warps, 1, "quantize_many", how.get("ctas", 2)
        shared_bytes = many.shared_bytes
    else:
        plan = quantize_few.plan_few(*shape, fuse, gathered, how.get("sms", 132), 227 * 1024)
        assert plan is not None and vector
        defines = plan.defines(x.dtype, hadamard, quantize_act_cuda.FUSE[fuse], quantize_act_cuda.LAYOUTS[layout])
        splits, threads, tokens, entry = plan.splits, plan.threads, 1, "quantize_few"
        shared_bytes = plan.shared_bytes
    defines |= {"ARCH": how.get("arch", 900)}
    if layout == "canonical":
        out = [torch.zeros(rows, blocks, BLOCK, dtype=torch.int8), torch.zeros(rows, blocks)]
    else:
        codes, meta = quantize_act_cuda.tiled_shapes(rows, blocks, layout)
        out = [torch.zeros(codes, dtype=torch.uint8), torch.zeros(meta)]
    perm = torch.arange(channels, dtype=torch.int32) if perm is None else perm
    residual, weight = how.get("residual"), how.get("weight")
    summed = None if residual is None else torch.empty_like(residual)
    given = [x, residual, summed, weight, perm, bits, clip, *out]
    held = [None if tensor is None else aligned(tensor) for tensor in given]
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in held]
    sizes = quantize_act_cuda._SIZES.pack(rows, channels, blocks, how.get("eps", 0.0))
    params = struct.pack(f"<{quantize_act_cuda._POINTERS}Q", *addresses) + sizes
    library = build(entry, defines)
    library.emulate(ctypes.c_char_p(params), -(-covered // tokens), splits, threads)
    assert library.shared_used() <= shared_bytes
    found = [held[7], held[8], held[2]]
    return [tensor for tensor in found if tensor is not None]


def problem(rows: int, channels: int, dtype: torch.dtype, mix: str, seed: int) -> tuple[Tensor, tuple]:  # type: ignore[type-arg]
    """x with outliers, blocks of very different size, zeros, tiny and huge rows; perm, bits, clip."""
    generator = torch.Generator().manual_seed(seed)
    blocks = num_blocks(channels)
    size = torch.exp2(torch.randint(-9, 9, (blocks,), generator=generator).float())
    x = torch.randn(rows, channels, generator=generator) * size.repeat_interleave(BLOCK)[:channels]
    x[:, :: max(1, channels // 5)] *= 60
    x[0, :BLOCK] = 0
    if rows > 4:
        x[2] = 0
        if dtype == torch.float32:
            x[3], x[4] = x[3] * 1e-28, x[4] * 1e30
    bits = torch.full((blocks,), 4, dtype=torch.uint8)
    bits[: round({"int4": 0, "mixed": 0.3, "half": 0.5, "int8": 1}[mix] * blocks)] = 8
    if mix == "half":  # precisions that change inside a warp
        bits = bits[torch.randperm(blocks, generator=generator)]
    clip = torch.where(torch.arange(blocks) % 3 == 0, 1.0, 0.4 + 0.6 * torch.rand(blocks, generator=generator))
    if mix == "mixed":
        clip[-1] = 0.03  # too small for the quick way
    perm = None if mix == "half" else torch.randperm(channels, generator=generator).to(torch.int32)
    return x.to(dtype), (perm, bits, clip)


def equal_to_the_reference(build, rows: int, channels: int, dtype: torch.dtype, mix: str, layout: str, **how) -> None:  # type: ignore[no-untyped-def]
    share, hadamard, tokens = how.pop("share", 1), how.pop("hadamard"), how.pop("tokens")
    x, (perm, bits, clip) = problem(rows, channels, dtype, mix, seed=rows + channels)
    perm = perm if how.pop("gathered", True) else None
    got = run(build, x, (perm, bits, clip, hadamard), layout, share, tokens, **how)
    if layout == "canonical":
        wanted = quantize_act_ref(x, perm, bits, clip, hadamard, share)
    else:
        wanted = quantize_act_cuda.quantize_act_tiled_ref(x, perm, bits, clip, hadamard, layout, share)
    if layout == "sm_90":  # without the padding tokens
        assert torch.equal(got[0], wanted[0])
        got = untile_activations_sm90(*got, rows, bits)
        wanted = untile_activations_sm90(*wanted, rows, bits)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (mix, layout, share, hadamard)


MIXES = ("int4", "mixed", "half", "int8")


def test_the_usual_form_equals_the_reference(build) -> None:  # type: ignore[no-untyped-def]
    for mix in MIXES:
        how = {"hadamard": True, "tokens": 2}
        equal_to_the_reference(build, 9, 1408, torch.bfloat16, mix, "sm_90", **how)


def test_the_form_without_dpx_instructions_equals_the_reference(build) -> None:  # type: ignore[no-untyped-def]
    for mix in MIXES:
        how = {"hadamard": True, "tokens": 2, "arch": 800}
        equal_to_the_reference(build, 9, 896, torch.bfloat16, mix, "sm_80", **how)


def test_the_form_for_few_tokens_equals_the_reference(build) -> None:  # type: ignore[no-untyped-def]
    """Mix "half" has no permutation, so nothing is gathered there."""
    for mix in MIXES:
        how = {"hadamard": True, "tokens": 0, "sms": 8}
        equal_to_the_reference(build, 9, 2884, torch.bfloat16, mix, "sm_90", **how)


@pytest.fixture
def any_number_is_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_many, "FEWEST_TOKENS", dict.fromkeys(quantize_many.FUSES, 0))


@pytest.mark.usefixtures("any_number_is_many")
def test_the_form_for_many_tokens_equals_the_reference(build) -> None:  # type: ignore[no-untyped-def]
    for mix in MIXES:
        how = {"hadamard": True, "tokens": -1, "gathered": False}
        equal_to_the_reference(build, 21, 2888, torch.bfloat16, mix, "sm_90", **how)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("any_number_is_many")
@pytest.mark.parametrize(("dtype", "shape"), [(torch.bfloat16, (7, 1024)), (torch.float16, (30, 9000))])
def test_every_form_for_many_tokens_equals_the_reference(  # type: ignore[no-untyped-def]
    build, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    for hadamard, mix, ctas in itertools.product((True, False), MIXES, (1, 3)):
        how = {"hadamard": hadamard, "tokens": -1, "ctas": ctas, "gathered": False}
        equal_to_the_reference(build, *shape, dtype, mix, "sm_90", **how)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.bfloat16, (5, 4900)), (torch.float16, (9, 2884)), (torch.bfloat16, (1, 256))]
)
def test_every_form_for_few_tokens_equals_the_reference(  # type: ignore[no-untyped-def]
    build, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    for layout, hadamard, mix in itertools.product(("sm_90", "canonical", "sm_80", "portable"), (True, False), MIXES):
        how = {"hadamard": hadamard, "tokens": 0, "sms": 132 if mix == "int4" else 4}
        equal_to_the_reference(build, *shape, dtype, mix, layout, **how)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("tokens", "dtype", "threads", "stage", "shape"),
    [
        (2, torch.bfloat16, 256, True, (9, 1408)),
        (2, torch.bfloat16, 128, True, (6, 2560)),
        (1, torch.bfloat16, 256, True, (5, 579)),
        (1, torch.bfloat16, 256, False, (3, 640)),
        (2, torch.float32, 256, True, (9, 896)),
        (1, torch.float16, 256, True, (7, 1152)),
    ],
)
def test_every_form_equals_the_reference(  # type: ignore[no-untyped-def]
    build, tokens: int, dtype: torch.dtype, threads: int, stage: bool, shape: tuple[int, int]
) -> None:
    for layout, hadamard in itertools.product(("sm_90", "canonical", "sm_80", "portable"), (True, False)):
        if layout in ("sm_80", "portable") and not hadamard:
            continue
        how = {"hadamard": hadamard, "tokens": tokens, "threads": threads, "stage": stage}
        for mix in MIXES:
            equal_to_the_reference(build, *shape, dtype, mix, layout, **how, splits=1 + (mix == "int4"))


@pytest.mark.usefixtures("any_number_is_many")
@pytest.mark.parametrize(("tokens", "mix"), [(1, "mixed"), (0, "mixed"), (0, "half"), (-1, "half")])
def test_fused_forms_differ_by_one_code_at_most(build, tokens: int, mix: str) -> None:  # type: ignore[no-untyped-def]
    rows, channels = (5, 640) if tokens >= 0 else (21, 1288)
    x, (perm, bits, clip) = problem(rows, channels, torch.bfloat16, mix, seed=1)
    common = (perm, bits, clip, True)
    generator = torch.Generator().manual_seed(2)
    weight = (1 + 0.1 * torch.randn(channels, generator=generator)).bfloat16()
    residual = torch.randn(rows, channels, generator=generator).bfloat16()
    how = {"fuse": "rms_norm", "residual": residual, "weight": weight, "eps": 1e-6}
    gathered = torch.randperm(channels, generator=generator).to(torch.int32)  # also where SiLU gathers nothing
    *got, summed = run(build, x, (gathered, *common[1:]), "sm_90", 1, tokens, **how)
    *wanted, wanted_sum = rms_norm_quantize_ref(x, residual, weight, 1e-6, gathered, *common[1:4], "sm_90")
    assert torch.equal(summed, wanted_sum)
    gate_up = torch.randn(rows, 2 * channels, generator=generator).mul(3).bfloat16()
    silu = run(build, gate_up, common, "sm_90", 1, tokens, fuse="silu_mul")
    wanted_silu = silu_mul_quantize_ref(gate_up, *common[:4], "sm_90")
    for mine, theirs in ((got, wanted), (silu, wanted_silu)):
        codes, scale, total = untile_activations_sm90(*mine, rows, bits)
        wanted_codes, wanted_scale, _ = untile_activations_sm90(*theirs, rows, bits)
        assert torch.allclose(scale, wanted_scale, rtol=2**-7)  # one step of bf16 in the largest value
        assert torch.equal(total, codes.float().sum(-1))
        off = (codes.int() - wanted_codes.int()).abs()
        assert off.max() <= 1 and (off > 0).float().mean() <= 1e-4 + 4 / off.numel()
