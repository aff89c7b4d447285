"""Two 4-bit codes in a byte: the even index lies in the low nibble. This file is the only one that knows.

Codes are unsigned, 0..15. A symmetric code is stored in offset binary (q + 8), so symmetric and asymmetric tensors
share one layout and differ only in where the zero point comes from.
"""

import torch
from torch import Tensor

SYMMETRIC_ZERO = 8  # the code of 0 in a symmetric 4-bit tensor


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes [..., 2n], each 0..15 -> uint8 [..., n]; byte j holds code 2j (low nibble) and 2j + 1 (high)."""
    assert codes.dtype == torch.uint8 and codes.shape[-1] % 2 == 0
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 codes [..., 2n]: the inverse of `pack_nibbles`."""
    assert packed.dtype == torch.uint8
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
