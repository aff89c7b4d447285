"""The quick way to codes in include/comet/codes.cuh, followed step by step on the CPU with its own constants.

What is shown: a value that the quick way does not put in doubt gets the code that IEEE division and rounding half to
even give, even when the reciprocal is off in its last bit; and few values are in doubt.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import comet_cuda
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import HADAMARD_NORM, quantize_act_ref

HEADER = (Path(comet_cuda.__file__).parent / "include" / "comet" / "codes.cuh").read_text()


def constant(name: str) -> str:
    found = re.search(rf"constexpr \w+ (?:\w+ = [^,;]+, )?{name} = ([^,;]+)[,;]", HEADER)
    assert found, name
    return found.group(1)


CENTER_BITS = int(constant("kCenterBits").rstrip("u"), 16)
CENTER = np.uint32(CENTER_BITS).view(np.float32)
STEP = np.float32(float.fromhex(constant("kStep").rstrip("f")))
BIAS = int(constant("kBias4"))
DOUBTFUL = 2  # lower halves below this


def quick(x: np.ndarray, factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 x * factor + center -> codes, and whether they are in doubt. The product and sum are exact in float64."""
    exact = x.astype(np.float64) * factor.astype(np.float64)
    bits = (exact + np.float64(CENTER)).astype(np.float32).view(np.uint32)
    steps = (bits >> 16).astype(np.uint16).view(np.int16).astype(np.int32)
    codes = np.clip(steps - ((CENTER_BITS >> 16) - BIAS), 0, 2 * BIAS) - BIAS
    return codes, (bits & 0xFFFF) < DOUBTFUL


def divided(x: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(x / divisor), -7, 7).astype(np.int32)


def test_the_constants_are_what_the_proof_needs() -> None:
    assert np.spacing(CENTER) * 2**16 == STEP  # the lower half counts 2^-16 steps
    assert STEP * 192.5 + np.spacing(CENTER) == CENTER  # half a step, and one unit
    assert "(least & 0xFFFEu) != 0" in HEADER


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-40, 39),
    nudge=st.integers(-1, 1),
    norm=st.sampled_from([np.float32(1), np.float32(HADAMARD_NORM)]),
)
def test_codes_without_doubt_are_right_beside_every_boundary(
    seed: int, exponent: int, nudge: int, norm: np.float32
) -> None:
    """`nudge`: the reciprocal is so many units in the last place off."""
    random = np.random.default_rng(seed)
    divisor = np.float32(random.uniform(1, 2, (64, 1))) * np.float32(2.0) ** exponent
    boundary = (np.arange(-9, 9) + 0.5)[None, :] * divisor.astype(np.float64)
    nearest = (boundary / np.float64(norm)).astype(np.float32).view(np.int32)
    distance = np.concatenate((np.arange(-64, 65), random.integers(-3000, 3000, 200)))
    x = (nearest[..., None] + distance.astype(np.int32)).view(np.float32)
    reciprocal = (1 / divisor.astype(np.float64)).astype(np.float32)
    reciprocal = (reciprocal.view(np.int32) + nudge).view(np.float32)
    factor = ((reciprocal * STEP) * norm)[..., None]
    codes, doubt = quick(x, factor)
    wanted = divided(x * norm, divisor[..., None])
    assert np.array_equal(codes[~doubt], wanted[~doubt])
    assert doubt.any() and (codes != wanted).any()  # the test reaches what it is about


def test_few_values_are_in_doubt() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((4000, 128)).astype(np.float32)
    divisor = (np.abs(x).max(-1, keepdims=True) * np.float32(0.9 / 7)).astype(np.float32)
    codes, doubt = quick(x, (np.float32(1) / divisor) * STEP)
    assert 0 < doubt.mean() < 2 * DOUBTFUL / 2**16
    assert np.array_equal(codes[~doubt], divided(x, divisor)[~doubt])


def test_codes_beyond_the_clamp_stay_beyond_it() -> None:
    """With a clip of 1/16 or more, unclamped codes reach 7 * 16; the order of the upper halves holds to 192."""
    x = np.linspace(-191, 191, 100001, dtype=np.float32)
    codes, doubt = quick(x, np.full(1, STEP))
    assert np.array_equal(codes[~doubt], divided(x, np.float32([1]))[~doubt])
    assert float(constant("kQuickClip").split("/")[0].rstrip("f ")) / 16 >= 7 / 191


def test_a_share_that_there_is_not_is_named() -> None:
    bits, clip = torch.full((2,), 4, dtype=torch.uint8), torch.ones(2)
    with pytest.raises(CometError, match="share=4"):
        quantize_act_ref(torch.ones(1, 256), None, bits, clip, True, 4)
