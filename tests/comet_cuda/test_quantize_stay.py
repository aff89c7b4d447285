"""quantize_token by ctas that stay (quantize_stay.*): what is planned, and the kernel run on the CPU."""

import itertools
import random

import pytest
import torch

from comet_cuda import quantize_row, quantize_stay
from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.quantize_token_plan import MOST_CLUSTER, plan_token
from comet_cuda.quantize_token_ref import quantize_token_ref, silu_mul_quantize_token_ref
from tests.comet_cuda.test_quantize_act_emulated import build  # noqa: F401
from tests.comet_cuda.test_quantize_act_emulated import pytestmark as emulation
from tests.comet_cuda.test_quantize_token import LIMIT, emulate
from tests.comet_cuda.token_problems import MIXES, equal, exact_silu, problem

SMS = (78, 114, 132)  # multiprocessors of GPUs of Hopper's kind
STAY_FORMS = [dict(one.defines) for one in quantize_stay.configurations("sm_90")]


def test_what_few_tokens_and_the_norm_leave_goes_to_ctas_that_stay() -> None:
    """All blocks have a warp; what is asked for lets so many ctas on a multiprocessor, and no more."""
    for rows, channels in itertools.product(
        (1, 16, 29, 30, 66, 132, 133, 192, 256, 384, 400, 1024, 4096),
        (584, 4096, 8704, 8712, 14336, 28672, 40968, 49152),
    ):
        for fuse, gathered in itertools.product(("none", "silu_mul"), (False, True)):
            plan = quantize_stay.plan_stay(rows, channels, fuse, gathered, 132, LIMIT)
            few = quantize_row.plan_row(rows, channels, fuse, gathered, 5, 132, LIMIT)
            assert few is None or plan is None
            if plan is None:
                narrow = rows <= (396 if channels == 584 else 132 if channels == 4096 else 0)
                assert narrow or (not gathered and rows <= 8 and channels > 8192)
                assert few is not None or not narrow or (gathered and fuse == "silu_mul")
                continue
            assert plan.defines(torch.bfloat16, True, fuse, gathered) in STAY_FORMS
            each = -(-num_blocks(channels) // plan.cluster)
            assert 8 * (plan.warps - 2) >= each and (plan.cluster - 1) * each < num_blocks(channels)
            fit = (LIMIT + 1024) // (plan.shared_bytes + 1024)
            assert fit == plan.ctas and plan.used <= plan.shared_bytes <= LIMIT
            assert plan.ctas * 64 * 32 * plan.warps <= 65536 and plan.tokens <= rows
            assert plan.tokens * plan.cluster <= 132 * plan.ctas and plan.tokens * plan.rounds >= rows
    assert quantize_stay.plan_stay(256, 4096, "rms_norm", True, 132, LIMIT) is None
    assert quantize_stay.plan_stay(256, 4100, "none", True, 132, LIMIT) is None


def test_every_shape_of_every_hopper_gpu_has_a_plan_that_fits() -> None:
    """Of this kernel, of the one for few tokens, or of the general one, which takes what they leave."""
    rng, general = random.Random(1), 0
    for _ in range(5000):
        rows, channels, sms = rng.randint(1, rng.choice((9, 400, 9000))), 8 * rng.randint(1, 6144), rng.choice(SMS)
        fuse, gathered, eights = rng.choice(("none", "silu_mul")), rng.random() < 0.5, rng.choice((0, 5, 40))
        plan = quantize_stay.plan_stay(rows, channels, fuse, gathered, sms, LIMIT)
        if plan is None:
            if quantize_row.plan_row(rows, channels, fuse, gathered, eights, sms, LIMIT) is None:
                assert quantize_row.is_few(rows, num_blocks(channels), sms) or (not gathered and rows <= 8)
                general += 1
                token = plan_token(rows, channels, fuse, gathered, True, sms, MOST_CLUSTER)
                assert token.shared_bytes <= LIMIT - 1024
            continue
        blocks = num_blocks(channels)
        assert plan.defines(torch.float16, True, fuse, gathered) in STAY_FORMS
        assert plan.used <= plan.shared_bytes <= LIMIT and plan.ctas * (plan.shared_bytes + 1024) <= LIMIT + 1024
        assert plan.warps <= 32 and plan.ctas * plan.warps * 32 * 64 <= 65536
        assert 1 <= plan.tokens <= rows and plan.tokens * plan.cluster <= sms * plan.ctas
        assert plan.far or not gathered or blocks * BLOCK * 2 <= 1 << 16  # bytes that 16 bits count
        each = -(-blocks // plan.cluster)
        for first in range(0, each * plan.cluster, each):
            own = min(each, blocks - first)
            eight = max(0, min(own, eights - first))
            assert own > 0 and -(-eight // 8) + -(-(own - eight) // 8) < plan.warps
    assert general > 0


@pytest.mark.parametrize(
    ("channels", "ctas"),
    [
        (4096, {256: 1, 512: 1, 4096: 1}),
        (8192, {1: 4, 16: 4, 64: 2, 133: 2, 192: 2, 256: 1, 512: 1, 4096: 1}),
        (11008, {1: 4, 16: 4, 64: 2, 128: 1, 256: 1, 384: 2, 512: 1, 4096: 1}),
        (14336, {16: 4, 29: 4, 30: 2, 64: 2, 128: 1, 133: 2, 192: 2, 256: 1, 384: 2, 512: 1, 4096: 1}),
        (28672, {16: 4, 64: 2, 256: 2, 4096: 2}),
        (49152, {16: 4, 64: 2, 256: 2, 4096: 2}),
    ],
)
def test_ctas_of_a_token_are_those_that_were_measured_as_the_fastest(channels: int, ctas: dict[int, int]) -> None:
    for rows, wanted in ctas.items():
        plan = quantize_stay.plan_stay(rows, channels, "none", True, 132, LIMIT)
        assert plan is not None and plan.cluster == wanted, rows
    few = quantize_stay.plan_stay(1024, 4096, "none", True, 132, LIMIT)
    assert few is not None and few.ctas == 4 and few.room == 5  # 7.9 us; five take 9.5


@emulation
@pytest.mark.parametrize(
    ("rows", "channels", "stay", "tokens"),
    [
        (7, 1416, 1, 2),
        (5, 5192, 2, 2),  # more than 32 INT8 blocks
        (5, 2888, 4, 1),
        (2, 584, 2, 3),
        pytest.param(1, 40968, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_ctas_that_stay_equal_the_reference(  # type: ignore[no-untyped-def]
    build,  # noqa: F811
    rows: int,
    channels: int,
    stay: int,
    tokens: int,
) -> None:
    for i, mix in enumerate(MIXES):
        how = {"gathered": mix in ("mixed", "int8"), "hadamard": i != 1 or channels == 1416}
        x, arguments = problem(rows, channels, torch.bfloat16, mix, **how)
        got = emulate(build, x, arguments, stay=stay, tokens=tokens)
        assert equal(got, quantize_token_ref(x, *arguments), rows, arguments[1]), mix
        gate_up = exact_silu(x.clamp(-900, 900))
        got = emulate(build, gate_up, arguments, "silu_mul", stay=stay, tokens=tokens)
        assert equal(got, silu_mul_quantize_token_ref(gate_up, *arguments), rows, arguments[1]), mix


@emulation
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_shape_is_taken_by_ctas_that_stay(build, seed: int) -> None:  # type: ignore[no-untyped-def] # noqa: F811
    """Rows of one block and of hundreds, INT8 blocks around what a warp and a sum take, any order of channels."""
    rng, taken = random.Random(seed), 0
    while taken < 40:
        cluster, fuse = rng.choice(quantize_stay.CLUSTERS), rng.choice(("none", "silu_mul"))
        most = rng.choice((9, 50, 50, 384))
        blocks = rng.randint(1, most)
        channels, rows = blocks * BLOCK - 8 * rng.choice((0, 0, 1, 15)), rng.randint(1, 3 if most == 384 else 12)
        how = {"gathered": rng.random() < 0.6, "hadamard": rng.random() < 0.7}
        if quantize_stay.fit(rows, channels, fuse, how["gathered"], cluster, 1, LIMIT) is None:
            continue
        taken += 1
        dtype = rng.choice((torch.bfloat16, torch.float16))
        x, (perm, _, clip, hadamard) = problem(rows, channels, dtype, rng.choice([*MIXES]), **how)
        if perm is not None and rng.random() < 0.2:
            perm = torch.arange(channels, dtype=torch.int32).flip(0)
        eights = min(blocks, rng.choice((0, 1, 7, 8, 9, 31, 32, 33, blocks)))
        arguments = perm, eights, clip, hadamard
        reference = quantize_token_ref
        if fuse == "silu_mul":
            x, reference = exact_silu(x.clamp(-900, 900)), silu_mul_quantize_token_ref
        tokens = rng.randint(1, rows)
        got = emulate(build, x, arguments, fuse, stay=cluster, tokens=tokens)
        assert equal(got, reference(x, *arguments), rows, eights), (cluster, fuse, channels, rows, tokens, eights, how)
