"""Rotations that a model can carry in its weights: Hadamard matrices of its widths, and a check that nothing changed.

A rotation of the hidden states between layers moves into the weights once the norms' own weights have moved into the
linears behind them; rotations of the value heads move into v and o (Ashkboos et al., QuaRot, 2024, arXiv:2404.00456).
Both spread outlier channels over all others. A width that is 2^k times (p + 1) or 2 (p + 1) for a prime p has a
Hadamard matrix by Paley's construction; any other gets a random orthogonal matrix.
"""

import torch
from torch import Tensor


def is_prime(number: int) -> bool:
    """Whether a small number is a prime."""
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def paley(order: int) -> Tensor | None:
    """A Hadamard matrix f64 [order, order] with entries +-1, by Paley's first or second construction; None if neither
    gives one."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order == 2:
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    if is_prime(order - 1) and (order - 1) % 4 == 3:
        core = _jacobsthal(order - 1)
        skew = torch.zeros(order, order, dtype=torch.float64)
        skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, core
        return skew + torch.eye(order, dtype=torch.float64)
    prime = order // 2 - 1
    if order % 4 == 0 and is_prime(prime) and prime % 4 == 1:
        conference = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
        conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1, 1, _jacobsthal(prime)
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(conference, plus) + torch.kron(torch.eye(prime + 1, dtype=torch.float64), minus)
    return None


def _jacobsthal(prime: int) -> Tensor:
    """f64 [p, p]: the Legendre symbol of (row - column)."""
    squares = {pow(n, 2, prime) for n in range(1, prime)}
    symbol: Tensor = torch.tensor([0.0] + [1.0 if n in squares else -1.0 for n in range(1, prime)], dtype=torch.float64)
    places = torch.arange(prime)
    return symbol[(places[:, None] - places[None, :]) % prime]


def rotation(width: int, seed: int) -> Tensor:
    """An orthogonal matrix f64 [width, width]: Hadamard with random signs where there is one, else random."""
    generator = torch.Generator().manual_seed(seed)
    core: Tensor | None = None
    doublings = 0
    while core is None and width % (1 << doublings) == 0:
        core = paley(width >> doublings)
        doublings += 1
    if core is None:
        gauss = torch.randn(width, width, dtype=torch.float64, generator=generator)
        orthogonal, triangle = torch.linalg.qr(gauss)
        signed: Tensor = orthogonal * triangle.diagonal().sign()
        return signed
    for _ in range(doublings - 1):
        core = torch.kron(core, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    signs = torch.randint(2, (width,), generator=generator).double() * 2 - 1
    spread: Tensor = core * signs[:, None] / width**0.5
    return spread
