"""Packed model + 16-bit model -> the packed model, tuned: distillation of what GPTQ cannot see.

GPTQ brings each linear near its own outputs; what the errors of all layers do to the next token together, nobody has
looked at so far. Here the whole packed model runs on the calibration windows as it will run (integer activations, 4-bit
keys and values), and the divergence of its next-token distribution from the 16-bit model's is lowered by gradient
descent over few numbers: weight scales, norms and biases, and, where the recipe asks for it, the real values that the
weight codes are rounded from. Rounding is passed straight through. Windows that GPTQ did not fit either judge: what
does not lower the divergence there is dropped.

Source: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015; scales alone: Chen et al., "EfficientQAT",
2024 (arXiv:2407.11062).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from comet_core.kv_cache import attend, fake_quantize_keys, fake_quantize_values
from comet_core.linear import W4AxLinear
from comet_core.progress import Progress
from comet_core.recipe import KVCacheSpec, TuningSpec
from comet_core.scores import final_hidden, log_probabilities
from comet_cuda.affine import BLOCK, code_max, split_blocks
from comet_cuda.int4 import SYMMETRIC_ZERO, pack_nibbles
from comet_cuda.quantize_act import hadamard_blocks, quantize_act, to_blocks
from comet_cuda.w4ax_gemm import weight_integers
from comet_cuda.weight_grid import snap_scale

LOGIT_ROWS = {"cpu": 256, "cuda": 2048}  # token rows whose logits are held at once
TOKENS_A_PASS = {"cpu": 2048, "cuda": 8192}  # that go through the models at once
WARM_UP = 0.1  # share of the steps
BETAS = (0.9, 0.95)  # of Adam


@dataclass(frozen=True)
class Tuned:
    """What came out. `tensors` is empty if the judge refused it.

    Attributes:
        tensors: stored tensors that changed, by their name in the checkpoint.
        before, after: divergence from the 16-bit model on the judging windows, nats a token.
    """

    tensors: dict[str, Tensor]
    before: float
    after: float


def tune(
    model: nn.Module,
    teacher: nn.Module,
    tokens: Tensor,
    *,
    spec: TuningSpec,
    kv_cache: KVCacheSpec,
    holdout: float,
    seed: int,
    progress: Progress,
) -> Tuned:
    """Distill `teacher` into `model`.

    Args:
        model: packed, on its device; its linears are replaced for good. teacher: the 16-bit model, same device.
        tokens: int64 [windows, L]. spec: epochs, windows a step, rates. holdout: share of the windows that judges.
        seed: of the windows' order.
    """
    device = next(model.parameters()).device
    _straight_attention(model, kv_cache)
    every = round(1 / holdout) if holdout else 0
    judging = torch.arange(len(tokens)) % every == every - 1 if 0 < every <= len(tokens) else torch.zeros(0).bool()
    judge = tokens[judging] if len(judging) else tokens
    train = tokens[~judging] if len(judging) else tokens
    trainable = _TrainableModel(model, spec)
    before = _divergence(model, teacher, judge, device)
    steps = spec.epochs * math.ceil(len(train) / spec.windows)
    optimizer = torch.optim.Adam(trainable.groups, betas=BETAS, eps=1e-12, fused=device.type == "cuda")
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(seed)
    with progress.task("tune", steps) as task:
        step = 0
        for _ in range(spec.epochs):
            for chosen in torch.randperm(len(train), generator=generator).split(spec.windows):
                _accumulate(model, teacher, train[chosen], device)
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * _schedule(step, steps)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                trainable.clamp()
                step += 1
                task.advance()
    after = _divergence(model, teacher, judge, device)
    progress.log(f"tuning: divergence from the 16-bit model {before:.4f} -> {after:.4f} nats a token, held-out windows")
    return Tuned(trainable.stored() if after < before else {}, before, after)


def _schedule(step: int, steps: int) -> float:
    """Rises over the first steps, falls to zero as a cosine."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _passes(tokens: Tensor, device: torch.device) -> Iterator[Tensor]:
    rows = max(1, TOKENS_A_PASS.get(device.type, TOKENS_A_PASS["cpu"]) // tokens.shape[1])
    for part in tokens.split(rows):
        yield part.to(device)


def _accumulate(model: nn.Module, teacher: nn.Module, tokens: Tensor, device: torch.device) -> None:
    """Add the gradient of the mean divergence over `tokens`."""
    share = 1 / (tokens.shape[0] * (tokens.shape[1] - 1))
    for part in _passes(tokens, device):
        with torch.no_grad():
            wanted = final_hidden(teacher, part)
        with torch.enable_grad():
            hidden = final_hidden(model, part)
            leaf = hidden.detach().requires_grad_()
            for rows in _row_ranges(len(leaf), device):
                (_rows_divergence(model, teacher, leaf[rows], wanted[rows]) * share).backward()
            hidden.backward(leaf.grad)


@torch.no_grad()
def _divergence(model: nn.Module, teacher: nn.Module, tokens: Tensor, device: torch.device) -> float:
    total, count = 0.0, 0
    for part in _passes(tokens, device):
        hidden, wanted = final_hidden(model, part), final_hidden(teacher, part)
        for rows in _row_ranges(len(hidden), device):
            total += float(_rows_divergence(model, teacher, hidden[rows], wanted[rows]))
        count += len(hidden)
    return total / count


def _row_ranges(count: int, device: torch.device) -> Iterator[slice]:
    step = LOGIT_ROWS.get(device.type, LOGIT_ROWS["cpu"])
    for start in range(0, count, step):
        yield slice(start, start + step)


def _rows_divergence(model: nn.Module, teacher: nn.Module, hidden: Tensor, wanted: Tensor) -> Tensor:
    """Sum over rows of KL(teacher || model)."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    kind = getattr(head, "weight", None)
    log_p = log_probabilities(model, hidden.to(kind.dtype) if isinstance(kind, Tensor) else hidden)
    with torch.no_grad():
        log_q = log_probabilities(teacher, wanted)
    return (log_q.exp() * (log_q - log_p)).sum()


def _straight_attention(model: nn.Module, spec: KVCacheSpec) -> None:
    """Give the model attention whose 4-bit keys and values pass gradients straight through.

    Differs from kv_cache.py in one thing: a query reads the complete pages after it began in 4 bit too, its own page
    among them, so one plain attention serves the window.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    name = f"comet-tune-kv{spec.bits}-{spec.key_granularity}-page{spec.page}-sinks{spec.sinks}"

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        query, key = query.to(value.dtype), key.to(value.dtype)  # norms of heads are trained in float32
        if spec.bits == 4:
            key, value = _straight_pages(key, spec), _straight_values(value, spec)
        if softcap := options.get("softcap"):
            if attention_mask is None:
                attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
            return attend(query, key, value, attention_mask, options["scaling"], softcap).transpose(1, 2), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = name


def _straight_pages(key: Tensor, spec: KVCacheSpec) -> Tensor:
    whole = max(key.shape[2] - spec.sinks, 0) // spec.page * spec.page
    if not whole:
        return key
    columns = slice(spec.sinks, spec.sinks + whole)
    with torch.no_grad():
        change = torch.zeros_like(key)
        change[:, :, columns] = fake_quantize_keys(key[:, :, columns], spec) - key[:, :, columns]
    return key + change


def _straight_values(value: Tensor, spec: KVCacheSpec) -> Tensor:
    with torch.no_grad():
        change = torch.zeros_like(value)
        change[:, :, spec.sinks :] = fake_quantize_values(value[:, :, spec.sinks :]) - value[:, :, spec.sinks :]
    return value + change


class _Codes(torch.autograd.Function):
    """Rows [T, K] -> what their codes stand for in storage order, [T, NB * 128]; gradients as if unrounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: W4AxLinear) -> Tensor:
        ctx.linear = linear
        f = linear.inputs
        codes, scale = quantize_act(x, f.perm, f.block_bits, f.clip, f.hadamard, f.share)
        return (codes.float() * scale[..., None]).flatten(1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        f, channels = ctx.linear.inputs, ctx.linear.in_features
        blocks = split_blocks(gradients[0])
        if f.hadamard:  # symmetric and orthonormal: its own transpose
            turned = blocks @ _hadamard_matrix(blocks)
            blocks = torch.where((f.block_bits == 4)[:, None], turned, blocks)
        stored = blocks.flatten(1)[:, :channels]
        if f.perm is None:
            return stored, None
        result = torch.empty_like(stored)
        result[:, f.perm.long()] = stored
        return result, None


def _hadamard_matrix(like: Tensor) -> Tensor:
    return hadamard_blocks(torch.eye(BLOCK, device=like.device)).to(like.dtype)


class _Sized(nn.Module):
    """A vector as it was plus a trained drift [n] in units of its values' own sizes, none above their median.

    In Qwen2.5 a few values of a key's bias are hundreds of times the others, and a norm takes a massive channel down by
    a thousandth: a step that is alike for all of them, however small for the largest, ruins the others.
    """

    origin: Tensor
    size: Tensor

    def __init__(self, vector: Tensor) -> None:
        super().__init__()
        size = vector.detach().abs()
        self.register_buffer("origin", vector.detach().clone())
        self.register_buffer("size", torch.minimum(size, size.median()))

    def forward(self, drift: Tensor) -> Tensor:
        """The vector, f32 [n]."""
        return self.origin + self.size * drift

    def right_inverse(self, vector: Tensor) -> Tensor:
        """The drift that training starts from."""
        return torch.zeros_like(vector)


def _train_vector(module: nn.Module, leaf: str) -> nn.Parameter:
    """Replace a parameter [n] by a _Sized one in float32; returns its drift."""
    setattr(module, leaf, nn.Parameter(getattr(module, leaf).detach().float()))
    parametrize.register_parametrization(module, leaf, _Sized(getattr(module, leaf)))
    parametrizations: Any = module.parametrizations
    drift: nn.Parameter = parametrizations[leaf].original
    return drift


class _TrainableLinear(nn.Module):
    """A packed linear with gradients for scales, bias and, if asked, codes. K, N, NB as in W4AxLinear."""

    def __init__(self, linear: W4AxLinear, dtype: torch.dtype, *, codes: bool) -> None:
        super().__init__()
        self.linear, self.dtype = linear, dtype
        integers = weight_integers(linear.qweight, linear.w_zero)  # f32 [N, NB, 128]
        zero = torch.full_like(linear.w_scale, SYMMETRIC_ZERO) if linear.w_zero is None else linear.w_zero
        self.zero = zero.float()[..., None]
        self.drift = nn.Parameter(torch.zeros_like(linear.w_scale, dtype=torch.float32))  # of scales, relative
        self.values = nn.Parameter(integers, requires_grad=codes) if codes else integers.to(dtype)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach())

    def scale(self) -> Tensor:
        """f32 [N, NB], as it can be stored: in bfloat16, and as multiples of the rows' bases where they have such."""
        scale, base = self.linear.w_scale.float() * (1 + self.drift), self.linear.weight_base
        storable = scale.to(torch.bfloat16).float()
        if base is not None:
            storable = snap_scale(scale, base.float()[:, None], self.zero[..., 0])
        return scale + (storable - scale).detach()

    def integers(self) -> Tensor:
        """[N, NB, 128], codes less zero points."""
        if not self.values.requires_grad:
            return self.values
        rounded = torch.maximum(torch.minimum(self.values.round(), code_max(4) - self.zero), -self.zero)
        return (self.values + (rounded - self.values).detach()).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: float [..., K] -> the model's type [..., N]."""
        rows = x.reshape(-1, x.shape[-1]).to(self.dtype)
        if self.linear.act_bits < 16:
            seen: Tensor = _Codes.apply(rows, self.linear)  # type: ignore[no-untyped-call]
        else:
            seen = to_blocks(rows, self.linear.perm).flatten(1)
        weight = (self.integers() * self.scale().to(self.dtype)[..., None]).flatten(1)
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return nn.functional.linear(seen, weight, bias).view(*x.shape[:-1], self.linear.out_features)

    @torch.no_grad()
    def clamp(self) -> None:
        """Keep real values inside the codes' range, so that they can come back."""
        if self.values.requires_grad:
            self.values.copy_(torch.maximum(torch.minimum(self.values, code_max(4) - self.zero), -self.zero))

    @torch.no_grad()
    def stored(self) -> dict[str, Tensor]:
        """What training may have changed, in the form and by the names of W4AxLinear's buffers."""
        tensors = {"w_scale": self.scale().to(torch.bfloat16)}
        if self.values.requires_grad:
            codes = (self.integers().float() + self.zero).to(torch.uint8)
            tensors["qweight"] = pack_nibbles(codes.flatten(1))
        return tensors


class _TrainableModel:
    """The numbers of a packed model that tuning moves, each with its step."""

    def __init__(self, model: nn.Module, spec: TuningSpec) -> None:
        dtype, codes = next(model.parameters()).dtype, spec.code_rate > 0
        head = model.get_output_embeddings()  # type: ignore[operator]
        self.linears: dict[str, _TrainableLinear] = {}
        for name, module in list(model.named_modules()):
            if isinstance(module, W4AxLinear) and module is not head and module.qweight.dtype == torch.uint8:
                self.linears[name] = _TrainableLinear(module, dtype, codes=codes)
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, self.linears[name])
        self.vectors: dict[str, nn.Module] = {}  # whose they are
        drifts = []
        for name, parameter in list(model.named_parameters()):
            parameter.requires_grad_(False)
            owner, _, leaf = name.rpartition(".")
            if parameter.dim() == 1:
                self.vectors[name] = model.get_submodule(owner)
                drifts.append(_train_vector(self.vectors[name], leaf))
        linears = list(self.linears.values())
        rates = [
            ([linear.drift for linear in linears], spec.learning_rate),
            (drifts, spec.vector_rate),
            ([linear.values for linear in linears if codes], spec.code_rate),
        ]
        self.groups: list[dict[str, Any]] = [{"params": values, "lr": rate} for values, rate in rates if rate]
        for group in self.groups:
            for parameter in group["params"]:
                parameter.requires_grad_(True)

    def clamp(self) -> None:
        """Keep real values inside the codes' range, so that they can come back."""
        for linear in self.linears.values():
            linear.clamp()

    def stored(self) -> dict[str, Tensor]:
        """Every tensor that may have changed, by its name in the checkpoint."""
        tensors = {
            f"{name}.{leaf}": value for name, linear in self.linears.items() for leaf, value in linear.stored().items()
        }
        return tensors | {
            name: getattr(owner, name.rpartition(".")[2]).detach() for name, owner in self.vectors.items()
        }
