"""One scale a token (quantize_token.*): the contract, what the launcher refuses, and the kernel run on the CPU."""

import ctypes
import itertools
import struct

import pytest
import torch
from torch import Tensor

from comet_cuda import (
    quantize_act_cuda,
    quantize_many,
    quantize_row,
    quantize_stay,
    quantize_token_plan,
)
from comet_cuda.affine import num_blocks
from comet_cuda.errors import CometError
from comet_cuda.quantize_token_plan import plan_plain, plan_token
from comet_cuda.quantize_token_ref import (
    MOST_CHANNELS,
    TokenOperand,
    first_blocks,
    quantize_by_token,
    quantize_token_ref,
    rms_norm_quantize_token_ref,
    silu_mul_quantize_token_ref,
    token_shapes,
)
from tests.comet_cuda.test_quantize_act_emulated import aligned, build  # noqa: F401
from tests.comet_cuda.test_quantize_act_emulated import pytestmark as emulation
from tests.comet_cuda.token_problems import MIXES, equal, exact_norm, exact_silu, problem, untile


@pytest.mark.parametrize("mix", MIXES)
def test_scales_are_multiples_that_the_gemm_can_add(mix: str) -> None:
    x, (perm, eights, clip, hadamard) = problem(40, 4224, torch.bfloat16, mix, gathered=True, hadamard=True)
    codes, scale, multiple = quantize_by_token(x, perm, first_blocks(33, eights, x.device), clip, hadamard)
    assert torch.equal(scale.view(torch.int32) & 0xFFF, torch.zeros(40, dtype=torch.int32))
    product = scale[:, None] * multiple
    assert torch.equal(product.double(), scale[:, None].double() * multiple.double())  # exact
    assert torch.equal(multiple, multiple.round()) and multiple.min() >= 1
    if mix != "int8":
        assert (codes[:, eights:].int() * multiple[:, eights:, None].int()).abs().max() <= 126
        assert multiple[:, eights:].max() == 18 if mix == "int4" else multiple[:, eights:].max() > 2
    if mix != "int4":
        assert (multiple[:, :eights].diff(dim=1) <= 0).all()  # so that the GEMM shifts its sums to the left only
        assert multiple[:, :eights].sum(-1).max() <= 500 + eights
        assert codes[:, :eights].abs().max() == 127
    assert scale[3] == 1 and (multiple[3] == 1).all() and (codes[3] == 0).all()  # the row of zeros


def test_the_power_of_the_outliers_wastes_no_codes() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(200, 9 * 128, generator=generator)
    x[:, :128] *= torch.exp2(8 * torch.rand(200, 1, generator=generator))
    codes, _, multiple = quantize_by_token(x, None, first_blocks(9, 3, x.device), torch.ones(9), False)
    outliers = multiple[:, 0] > 1
    assert outliers.sum() > 150 and (codes[outliers, 0].abs().amax(-1) == 127).all()
    assert multiple[outliers, 3:].amax(-1).min() >= 9  # of 18: the price


def contract(x: Tensor, eights: int, clip: Tensor) -> tuple[list[float], list[list[float]]]:
    """S and m of each token, number by number as the rules say it; x float32 [M, NB, 128], not rotated."""
    scales, multiples = [], []

    def f(value: float) -> Tensor:
        return torch.tensor(float(value), dtype=torch.float32)

    for row in x:
        bounds = [f(127) if b < eights else f(7) for b in range(len(row))]
        ratios = [block.abs().max() * (clip[b] / bounds[b]) for b, block in enumerate(row)]
        alone = list(ratios)
        for b in range(eights):
            ratios[b] = max(alone[2 ** ((b + 1).bit_length() - 1) - 1 : eights])
        parts = [f(0)] * 32
        for b in range(eights):
            parts[b % 32] = parts[b % 32] + ratios[b]
        for step in (16, 8, 4, 2, 1):
            parts = [parts[i] + parts[i ^ step] for i in range(32)]
        least = max(max([f(0), *ratios[eights:]]) * f(1 / 18), parts[0] * f(1 / 250))
        if eights and ratios[0] > least:  # raised until the first INT8 block's ratio is a power of two of it
            steps = 0
            while 2.0 ** (steps + 1) <= float(ratios[0] / least):
                steps += 1
            least = max(least, ratios[0] * f(2.0**-steps))
        scale = f(1)
        if least > 0:
            whole = (int(least.view(torch.int32)) + 0xFFF) & ~0xFFF
            scale = max(torch.tensor(whole, dtype=torch.int32).view(torch.float32), f(2.0**-100))
        scales.append(float(scale))
        found = []
        for b, ratio in enumerate(ratios):
            if b >= eights:
                found.append(float((ratio / scale).round().clamp(1, 18)))
                continue
            power = 1.0
            while power < float(ratio / scale):
                power *= 2
            found.append(power)
        multiples.append(found)
    return scales, multiples


@pytest.mark.parametrize("mix", MIXES)
def test_the_reference_is_the_contract(mix: str) -> None:
    x, (_, eights, clip, _) = problem(8, 5248, torch.bfloat16, mix, gathered=False, hadamard=False)
    scales, multiples = contract(x.float().view(8, -1, 128), eights, clip)
    codes, scale, multiple = quantize_by_token(x, None, first_blocks(41, eights, x.device), clip, False)
    assert scale.tolist() == scales and multiple.tolist() == multiples
    bytes_, words, token_scale = untile(quantize_token_ref(x, None, eights, clip, False), 8)
    assert torch.equal(token_scale, scale)
    powers = 2 ** (words & 255)
    assert torch.equal(powers[:, :eights], multiple[:, :eights].int())
    if eights:
        assert torch.equal((words >> 8).flip(1).cumsum(1).flip(1), words & 255)  # what is left to shift
    carried = codes.int()
    carried[:, eights:] *= multiple[:, eights:, None].int()
    assert torch.equal(bytes_.int(), carried)


def test_what_could_overflow_the_sums_is_refused() -> None:
    wide = MOST_CHANNELS + 128
    with pytest.raises(CometError, match="49280 channels"):
        quantize_token_ref(torch.zeros(1, wide), None, 0, torch.ones(num_blocks(wide)), False)
    for wrong in (-1, 3):
        with pytest.raises(CometError, match=f"int8_blocks is {wrong}"):
            quantize_token_ref(torch.zeros(1, 256), None, wrong, torch.ones(2), False)
    most = 500 + MOST_CHANNELS // 128  # multiples of a token whose blocks are all INT8
    assert 127 * 127 * 128 * most < 2**31
    assert 126 * 127 * MOST_CHANNELS < 2**31  # a mix of both lies between


@pytest.mark.parametrize("fuse", ["none", "rms_norm", "silu_mul"])
@pytest.mark.parametrize("vector", [True, False])
def test_plans_reach_every_block(fuse: str, vector: bool) -> None:
    for rows in (1, 20, 64, 132, 133, 4096):
        for channels in (1, 576, 4096, 8192, 14336, 28672, MOST_CHANNELS):
            plan = plan_token(rows, channels, fuse, channels % 3 == 0, vector, 132)
            blocks = num_blocks(channels)
            assert plan.rounds == 0 or plan.rounds * plan.warps * plan.cluster >= blocks
            assert plan.cluster == 1 or plan.cluster * rows <= 132
            assert 32 * plan.warps <= plan.defines(torch.bfloat16, True, fuse)["THREADS"]
            assert plan.shared_bytes <= 226 * 1024
            assert plan.defines(torch.bfloat16, True, fuse) in BUILT["sm_90"]
            shape = (rows, channels, fuse, channels % 3 == 0, vector, 108)
            if fuse == "rms_norm" and channels > 24576:  # beyond sm_86, sm_89 and sm_120
                with pytest.raises(CometError, match="does not fit"):
                    plan_plain(*shape, 99 * 1024)
                continue
            plan = plan_plain(*shape, 99 * 1024)
            assert plan.cluster == 1 and (plan.rounds == 0 or plan.rounds * plan.warps >= blocks)
            for layout in ("sm_80", "portable"):
                out = quantize_act_cuda.LAYOUTS[layout]
                assert plan.defines(torch.bfloat16, True, fuse, out) in BUILT[layout]
                if fuse == "none":
                    assert plan.defines(torch.float16, False, fuse) | {"OUT": 0} in BUILT[layout]


BUILT = {
    family: [dict(one.defines) for one in quantize_token_plan.configurations(family)]
    for family in ("sm_80", "sm_90", "portable")
}


def emulate(build, x: Tensor, arguments: tuple, fuse: str = "none", sms: int = 1, **how) -> TokenOperand:  # type: ignore[no-untyped-def, type-arg] # noqa: F811
    """What the kernel leaves; the sum of x and residual goes into `residual`.

    how: residual, weight and eps of the norm; row: quantize_row.cu, which must be able to take it; cluster: ctas that a
    token must have; stay: quantize_stay.cu with so many ctas a token, and `tokens` at once.
    """
    perm, eights, clip, hadamard = arguments
    rows, channels = x.shape[0], x.shape[1] // (2 if fuse == "silu_mul" else 1)
    gathered = perm is not None
    plan = plan_token(rows, channels, fuse, gathered, channels % 4 == 0, sms, how.get("cluster", 1))
    defines, threads, ctas, entry = plan.defines(x.dtype, hadamard, fuse), 32 * plan.warps, rows, "quantize_token"
    shared_bytes, cluster = plan.shared_bytes, plan.cluster
    many = quantize_many.plan_many(rows, channels, x.dtype, fuse, "sm_90", 0, gathered, 1, LIMIT)
    few = quantize_row.plan_row(rows, channels, fuse, gathered, eights, sms, LIMIT)
    assert few is not None or not how.get("row")
    if many is not None:
        defines = quantize_many.many_defines(x.dtype, hadamard, fuse, 0, eights)
        threads, ctas, entry, shared_bytes = 32 * many.warps, 2, "quantize_many", many.shared_bytes
    elif few is not None and how.get("row"):
        defines = few.defines(x.dtype, hadamard, fuse, gathered)
        threads, ctas, entry, shared_bytes, cluster = 32 * few.warps, rows, "quantize_row", few.used, 1
    assert cluster == how.get("cluster", cluster)
    if stay := how.get("stay"):
        fitting = quantize_stay.fit(rows, channels, fuse, gathered, stay, 1, LIMIT)
        assert fitting is not None
        defines, entry, shared_bytes = fitting.defines(x.dtype, hadamard, fuse, gathered), "quantize_stay", fitting.used
        threads, ctas, cluster = 32 * fitting.warps, how["tokens"], fitting.cluster
    codes, multiples, scale = token_shapes(rows, len(clip), eights)
    out = [torch.zeros(codes, dtype=torch.uint8), torch.full(multiples, -1, dtype=torch.int32), torch.zeros(scale)]
    out[2].fill_(torch.nan)
    perm = torch.arange(channels, dtype=torch.int32) if perm is None else perm
    residual = how.get("residual")
    given = [x, residual, residual, how.get("weight"), perm, out[1], clip, out[0], out[2]]
    held = [None if tensor is None else aligned(tensor) for tensor in given]
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in held]
    sizes = rows, channels, len(clip), how.get("eps", 0.0)
    params = struct.pack("<9Q3ifi4x", *addresses, *sizes, eights)
    library = build(entry, defines | {"ARCH": 900, "PARAMS": "TokenParams"})
    library.emulate(ctypes.c_char_p(params), ctas, cluster, threads)
    assert library.shared_used() <= shared_bytes
    if residual is not None:
        residual.copy_(held[2])
    return held[7], held[5], held[8]


LIMIT = 227 * 1024  # bytes of shared memory that a cta may have


@pytest.fixture
def any_number_is_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_many, "FEWEST_TOKENS_TOKEN", 0)


SHAPES = [  # rows, channels, multiprocessors
    (9, 1408, 132), (3, 579, 132), (1, 8200, 132),
    *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((7, 2308, 2), (2, 28800, 2), (3, 12800, 3))),
]  # fmt: skip


@emulation
@pytest.mark.parametrize(("rows", "channels", "sms"), SHAPES)
def test_the_kernel_equals_the_reference(build, rows: int, channels: int, sms: int) -> None:  # type: ignore[no-untyped-def] # noqa: F811
    for i, mix in enumerate(MIXES):
        for gathered in (True, False):
            how = {"gathered": gathered, "hadamard": i != 2 or gathered}
            x, arguments = problem(rows, channels, torch.bfloat16, mix, **how)
            got = emulate(build, x, arguments, sms=sms)
            assert equal(got, quantize_token_ref(x, *arguments), rows, arguments[1]), (mix, gathered)


ROWS = [(9, 1408, 132), (2, 584, 132)]


@emulation
@pytest.mark.parametrize(("rows", "channels", "sms"), ROWS)
def test_the_kernel_for_few_tokens_equals_the_reference(build, rows: int, channels: int, sms: int) -> None:  # type: ignore[no-untyped-def] # noqa: F811
    for i, mix in enumerate(MIXES):
        for gathered in (True, False):
            how = {"gathered": gathered, "hadamard": i != 2}
            x, arguments = problem(rows, channels, torch.bfloat16, mix, **how)
            got = emulate(build, x, arguments, sms=sms, row=True)
            assert equal(got, quantize_token_ref(x, *arguments), rows, arguments[1]), (mix, gathered)


@emulation
def test_fused_forms_for_few_tokens_equal_the_reference(build) -> None:  # type: ignore[no-untyped-def] # noqa: F811
    fused_equal(build, 9, 1152, gathered=False, sms=132, row=True)
    norm_equal(
        build, 5, 8712, problem(5, 8712, torch.float16, "mixed", gathered=True, hadamard=True)[1], sms=5, row=True
    )


@emulation
@pytest.mark.parametrize(("rows", "channels", "cluster"), [(2, 2184, 2), (1, 4228, 4)])
def test_clusters_of_the_general_kernel_equal_the_reference(build, rows: int, channels: int, cluster: int) -> None:  # type: ignore[no-untyped-def] # noqa: F811
    for mix, gathered in (("mixed", True), ("half", False)):
        x, arguments = problem(rows, channels, torch.bfloat16, mix, gathered=gathered, hadamard=True)
        got = emulate(build, x, arguments, sms=132, cluster=cluster)
        assert equal(got, quantize_token_ref(x, *arguments), rows, arguments[1]), mix


def test_a_multiprocessor_has_as_many_ctas_as_the_tokens_need() -> None:
    for rows, channels, fuse in itertools.product(
        (1, 16, 17, 132, 133, 256, 264, 265, 396, 397, 1024, 1025), (8, 576, 4096, 8192, 14336), quantize_many.FUSES
    ):
        gathered = fuse == "none" and channels % 3 != 0
        eights = round(0.16 * num_blocks(channels))
        plan = quantize_row.plan_row(rows, channels, fuse, gathered, eights, 132, LIMIT)
        wide, norm = channels == 14336, fuse == "rms_norm"
        most = (132 if wide else 1024) if norm else 396 if channels <= 576 else 132 if channels == 4096 else 0
        if rows > most:
            assert plan is None
            continue
        assert plan is not None and plan.warps >= num_blocks(channels) / 4 and plan.eights >= eights
        assert plan.defines(torch.float16, True, fuse, gathered) in ROW_FORMS
        fit = (LIMIT + 1024) // (plan.shared_bytes + 1024)
        assert fit == plan.ctas == min(-(-rows // 132), 1 if wide else 2 if channels == 8192 else 3)
        assert plan.used <= plan.shared_bytes
        assert plan.ctas * 32 * plan.warps <= 2048
    for refused in (
        (133, 4096, "none", True, 5), (1, 4100, "none", True, 5), (1, 15888, "rms_norm", True, 5),
        (1, 4096, "none", True, 33), (1, 6152, "silu_mul", False, 5), (1, 4096, "silu_mul", True, 5),
        (1025, 4096, "rms_norm", True, 5), (397, 576, "none", False, 2),
    ):  # fmt: skip
        assert quantize_row.plan_row(*refused, 132, LIMIT) is None


ROW_FORMS = [dict(one.defines) for one in quantize_row.configurations("sm_90")]


def fused_equal(build, rows: int, channels: int, gathered: bool = True, **how) -> None:  # type: ignore[no-untyped-def] # noqa: F811
    """Fused forms where their arithmetic is exact, whatever its order."""
    for mix in ("mixed", "half"):
        how_x = {"gathered": gathered and mix == "mixed", "hadamard": True}
        x, arguments = problem(rows, channels, torch.float16, mix, **how_x)
        gate_up = exact_silu(x.clamp(-900, 900))
        got = emulate(build, gate_up, arguments, "silu_mul", **how)
        assert equal(got, silu_mul_quantize_token_ref(gate_up, *arguments), rows, arguments[1])
        norm_equal(build, rows, channels, arguments, **how)


def norm_equal(build, rows: int, channels: int, arguments: tuple, **how) -> None:  # type: ignore[no-untyped-def, type-arg] # noqa: F811
    y, residual, weight = exact_norm(rows, channels, torch.float16)
    *wanted, summed = rms_norm_quantize_token_ref(y, residual, weight, 0.0, *arguments)
    got = emulate(build, y, arguments, "rms_norm", residual=residual, weight=weight, **how)
    assert equal(got, (wanted[0], wanted[1], wanted[2]), rows, arguments[1])
    assert torch.equal(residual, summed)
    assert wanted[0].unique().numel() > (100 if arguments[1] else 60)


@emulation
@pytest.mark.parametrize(("rows", "channels"), [(9, 1152), pytest.param(3, 577, marks=pytest.mark.slow)])
def test_fused_forms_equal_the_reference_where_their_arithmetic_is_exact(build, rows: int, channels: int) -> None:  # type: ignore[no-untyped-def] # noqa: F811
    fused_equal(build, rows, channels)


@emulation
@pytest.mark.usefixtures("any_number_is_many")
@pytest.mark.parametrize(("rows", "channels"), [(9, 1288), pytest.param(12, 4096, marks=pytest.mark.slow)])
def test_the_norm_of_many_tokens_equals_the_reference(build, rows: int, channels: int) -> None:  # type: ignore[no-untyped-def] # noqa: F811
    for mix in MIXES:
        how = {"gathered": mix in ("mixed", "int4"), "hadamard": mix != "int4"}
        norm_equal(build, rows, channels, problem(rows, channels, torch.float16, mix, **how)[1])
    assert quantize_many.plan_many(rows, channels, torch.float16, "rms_norm", "sm_90", 0, True, 1, LIMIT) is not None
