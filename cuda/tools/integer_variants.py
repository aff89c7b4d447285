"""The GEMM for integer scales in tuning and timing: random problems, the variants to try, and what must hold first."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from comet_cuda import w4ax_gemm_integer as gemm
from comet_cuda.bank_order import spread_over_banks
from comet_cuda.quantize_act import int8_group
from comet_cuda.quantize_token import quantize_token
from comet_cuda.timing import copies_for_cold_l2, median_microseconds
from comet_cuda.w4ax_gemm_integer import IntegerTiles
from comet_cuda.weight_layout import token_atoms, untile_activations_integer_sm90, untile_weight_integer_sm90

PART = 2048  # rows of a problem that are compared with the reference before it is timed


def split_candidates(m: int) -> list[IntegerTiles]:
    """Of tiles that a cluster shares those that won for as many tokens."""
    rows = [row for row in gemm.integer_table() if row.get("min_tokens", 1) <= m <= row.get("max_tokens", m)]
    won = [tiles for tiles in map(gemm.tiles_of, rows) if tiles.split > 1]
    return list(dict.fromkeys(won))


def integer_candidates(m: int) -> list[IntegerTiles]:
    """What tune tries for a batch."""
    return [*split_candidates(m), *_candidates(m)]


def _candidates(m: int) -> list[IntegerTiles]:
    if m > 512:
        whole = [IntegerTiles(128, 2, stages=5, stream=0, band=band) for band in (4, 8, 16)]
        return [*whole, IntegerTiles(256, stages=5, quick=1), IntegerTiles(128, row_wgs=3, stages=7, stream=0, quick=1)]
    if m > 128:
        return [
            IntegerTiles(128, 2, stages=5, stream=0, band=16),
            IntegerTiles(256, stages=5, quick=1),
            IntegerTiles(128, stages=8, quick=1),
            IntegerTiles(128, stages=8),
            IntegerTiles(128, stages=8, stream=0),
            IntegerTiles(64, stages=12, stream=0),
            IntegerTiles(128, row_wgs=3, stages=7, stream=0, quick=1),
            IntegerTiles(64, row_wgs=3, stages=10, stream=0, quick=1),
        ]
    if m > 64:
        return [
            IntegerTiles(128, stages=8, quick=1),
            IntegerTiles(128, stages=8, stream=0),
            IntegerTiles(64, stages=12, stream=0),
            IntegerTiles(128, row_wgs=3, stages=7, stream=0, quick=1),
            IntegerTiles(64, row_wgs=3, stages=10, stream=0, quick=1),
        ]
    if m > 32:
        few = [
            IntegerTiles(64, stages=12),
            IntegerTiles(64, stages=8),
            IntegerTiles(64, stages=12, batch=2),
            IntegerTiles(64, stages=12, stream=0),
        ]
    elif m > 16:
        few = [
            IntegerTiles(32, stages=14),
            IntegerTiles(32, stages=14, batch=2),
            IntegerTiles(32, row_wgs=3, stages=9),
        ]
    else:
        n = 8 if m <= 8 else 16
        few = [
            IntegerTiles(n, stages=11, batch=3),
            IntegerTiles(n, stages=14, batch=4),
            IntegerTiles(n, row_wgs=4, stages=8, batch=2),
            IntegerTiles(n, row_wgs=3, stages=12, batch=3),
            IntegerTiles(n, row_wgs=1, stages=28, batch=4),
        ]
    return few


def random_operands(
    m: int, n: int, blocks: int, int8_blocks: int, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes of normal activations, their words and scales, weight records and bases, as quantizing leaves them."""
    tokens = token_atoms(m) * 8
    codes = (torch.randn(blocks, tokens, 128, device=device) * 2.2).round().clamp(-7, 7)
    codes *= torch.randint(7, 19, (blocks, tokens, 1), device=device)
    codes[:int8_blocks] = (torch.randn(int8_blocks, tokens, 128, device=device) * 40).round().clamp(-127, 127)
    groups = torch.tensor([int8_group(block) for block in range(max(int8_blocks, 1))], device=device)
    falls = torch.randint(0, 2, (int(groups.max()) + 1, tokens), device=device)
    exponent = falls.flip(0).cumsum(0).flip(0)[groups]
    words = exponent | (exponent - torch.nn.functional.pad(exponent[1:], (0, 0, 0, 1))) << 8
    records = torch.randint(0, 256, (-(-n // 64), blocks, 4224), dtype=torch.uint8, device=device)
    zero = torch.randint(0, 16, (*records.shape[:2], 64), device=device)
    multiple = ((0.5 + 0.5 * torch.rand(zero.shape, device=device)) * (127 // torch.maximum(zero, 15 - zero))).int()
    records[..., 4096:] = torch.stack((multiple, 128 - multiple * zero), -1).flatten(2).to(torch.uint8)
    return (
        codes.to(torch.int8).view(torch.uint8).view(blocks, -1, 1024),
        words.view(-1, tokens // 8, 8).to(torch.int32),
        torch.rand(tokens, device=device) * 0.01 + 0.001,
        records,
        torch.rand(records.shape[0] * 64, device=device) * 0.01 + 0.001,
    )


class IntegerProblem:
    """Operands of one shape and batch, several sets of weights, and their times; interface of tune_gemm.Problem."""

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        int8_blocks: int,
        sets: int = 0,
        out: torch.dtype = torch.bfloat16,
        biased: bool = False,
    ) -> None:
        self.m, self.n, self.int8_blocks, self.out = m, n, int8_blocks, out
        blocks = -(-k // 128)
        self.bits = torch.tensor([8] * int8_blocks + [4] * (blocks - int8_blocks), dtype=torch.uint8)
        self.x, self.words, self.scale, records, self.base = random_operands(m, n, blocks, int8_blocks)
        self.bytes = records.numel() + self.x.numel() + 2 * m * n
        count = sets or copies_for_cold_l2(records.numel())
        self.sets = [records, *(records.clone() for _ in range(count - 1))]
        self.rows = min(n, PART)
        values = untile_activations_integer_sm90(self.x, self.words, m, int8_blocks).flatten(1).double()
        weights = untile_weight_integer_sm90(records[: -(-self.rows // 64)], self.rows).flatten(1).double()
        self.want = (values @ weights.T).float() * (self.scale[:m, None] * self.base[None, : self.rows])
        self.bias = torch.randn(n, device="cuda") if biased else None
        if self.bias is not None:
            self.want += self.bias[: self.rows]

    def launcher(self, records: Tensor, tiles: IntegerTiles | None, pdl: bool = True) -> Callable[[], Tensor]:
        operands = (self.x, self.words, self.scale, records, self.base, self.bias)
        return lambda: gemm.launch(*operands, self.m, self.n, self.int8_blocks, self.out, tiles, pdl)

    def problem(self, tiles: IntegerTiles | None, runs: int = 2) -> str:
        """Empty if the outputs are right and equal bit by bit, else what is wrong."""
        poison = torch.full((self.m, self.n), float("nan"), dtype=self.out, device="cuda")
        del poison  # the caching allocator hands this memory to the output
        outputs = [self.launcher(self.sets[0], tiles)() for _ in range(runs)]
        if any(not torch.equal(outputs[0], other) for other in outputs[1:]):
            return "runs differ"
        wrong = int((outputs[0][:, : self.rows] != self.want.to(self.out)).sum())
        return f"{wrong} of {self.want.numel()} results differ" if wrong else ""

    def time(self, tiles: IntegerTiles | None, pdl: bool = True, behind: bool = False) -> float:
        """Microseconds, or infinity with the reason printed. behind: of a quantization of as many tokens and the GEMM
        behind it, as a decoder has them: the next launch begins early, and where its ctas find room then decides."""
        if wrong := self.problem(tiles):
            print(f"  WRONG m={self.m} n={self.n} {tiles}: {wrong}")
            return float("inf")
        launches = [self.launcher(records, tiles, pdl) for records in self.sets]
        if behind:
            k = 128 * len(self.bits)
            x, perm = torch.randn(self.m, k, device="cuda").bfloat16(), torch.randperm(k, device="cuda").int()
            perm = spread_over_banks(perm, self.bits.cuda())
            clip = torch.ones(len(self.bits), device="cuda")
            launches = [
                lambda launch=launch: (quantize_token(x, perm, self.int8_blocks, clip, True), launch())  # type: ignore[misc]
                for launch in launches
            ]
        return median_microseconds(launches)


def edges(tiles: IntegerTiles | None) -> list[tuple[int, int, int, int]]:
    """Tokens, rows, blocks and INT8 blocks to try a variant with (None: what the table chooses for them)."""
    if tiles is not None:
        mixes = ((39, 14), (16, 0), (9, 9), (70, 11), (4, 2), (1, 1), (33, 1))
        cases = [(m, n, *mix) for mix in mixes for m, n in ((1, 1023), (65, 520), (300, 8))]
        return [*cases, (1024, 4096, 70, 11), (513, 2056, 39, 14)]
    batches = [*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4096]
    cases = [(m, 2056 if m < 1000 else 1032, *mix) for m in batches for mix in ((25, 4), (16, 0), (16, 16))]
    return cases + [(m, n, 25, 4) for m in batches if m <= 64 for n in (8, 6152, 16008)]


def integer_problems(tiles: IntegerTiles | None, runs: int = 3) -> Iterable[str]:
    """What is wrong with a variant (None: the table's), as it is found: edges, block mixes, types, repeated runs."""
    for m, n, blocks, eights in edges(tiles):
        for dtype in (torch.bfloat16, torch.float16, torch.float32)[: 3 if m in (65, 70) else 1]:
            if wrong := IntegerProblem(m, n, 128 * blocks, eights, 1, dtype, m % 2 == 1).problem(tiles, runs):
                yield f"m={m} n={n} {blocks} blocks, {eights} of 8 bits, {dtype}: {wrong}"
