"""ModelSource -> the same function with its hidden states and value heads rotated, all rotations in the weights.

In front of every norm-fed group the norm's weight moves into the linears' columns and the norm's becomes one, so the
norm commutes with a rotation Q of the hidden states. Then columns of the norm-fed linears take Q, rows of the linears
that write to the hidden states take Q too, and so do embedding and lm_head (which are no longer one tensor). Roles are
guessed from shapes and checked: each rotated layer must map rotated input to rotated output, else the model is refused.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.decoder import PROBE_TOKENS, Call, Decoder, is_tied, layer_linears, linear_groups, run_layer
from comet_core.edited_source import Edit, EditedSource, edited
from comet_core.folding import Fold, find_folds, float32_probe
from comet_core.model_source import ModelSource
from comet_core.rotate import rotation
from comet_cuda.errors import CometError

ROTATION_TOLERANCE = 1e-3  # relative change of outputs that is still float rounding
HIDDEN_SEED, HEAD_SEED = 0, 1
ROWS_AT_ONCE = 1 << 15


@torch.no_grad()
def rotated(source: ModelSource, tokens: Tensor, *, device: str) -> EditedSource:
    """The rotated model.

    Args:
        tokens: int64 [windows, length]; the first few check that nothing changed.

    Errors:
        CometError if the family cannot carry a rotation: norms behind attention or MLP, norms that subtract a mean,
        position embeddings added to the tokens'.
    """
    decoder = Decoder(source, device=device, dtype=torch.float32)
    decoder.load_non_layers()
    q = rotation(decoder.width, HIDDEN_SEED).float().to(decoder.device)
    probe = tokens[:1, :PROBE_TOKENS]
    hidden, calls = decoder.first_hidden(probe), decoder.calls(probe)
    edits: dict[str, list[Edit]] = {}
    offset = 0.0
    for index in range(len(decoder.layers)):
        layer = decoder.load_layer(index)
        label = f"{decoder.layer_prefix}.{index}"
        found, offset = _layer_edits(layer, label, hidden, calls[index], q, _head_dim(source), source)
        out = run_layer(layer, hidden, calls[index])
        again = run_layer(_edited_copy(layer, found), hidden @ q, calls[index])
        _check_same(again, out @ q, hidden @ q, f"{source.name}: {label}")
        edits |= {f"{label}.{name}": todo for name, todo in found.items()}
        hidden = out
        decoder.release_layer(index)
    outer, sources, config = _outer_edits(decoder, q, offset, source)
    return edited(source, edits | outer, f"rotate residual {HIDDEN_SEED} {HEAD_SEED}", config=config, sources=sources)


def _head_dim(source: ModelSource) -> int:
    config = source.config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _layer_edits(
    layer: nn.Module, label: str, hidden: Tensor, call: Call, q: Tensor, head_dim: int, source: ModelSource
) -> tuple[dict[str, list[Edit]], float]:
    """Edits by parameter name inside the layer, and what its norms add to their weights."""
    groups = linear_groups(layer, hidden, call, label)
    wide, states, arguments = float32_probe(layer, hidden, call)
    folds = find_folds(wide, groups, states, arguments, head_dim)
    linears, edits = layer_linears(layer), {}
    read: set[str] = set()
    offset = 0.0
    for fold in (fold for fold in folds if fold.is_norm):
        gain, offset = layer.get_submodule(fold.producer).get_parameter("weight").float() + fold.offset, fold.offset
        edits[f"{fold.producer}.weight"] = [_constant(1.0 - fold.offset)]
        for name in fold.consumers:
            edits[f"{name}.weight"] = [_columns(gain, q)]
        read |= set(fold.consumers)
    if not read:
        raise CometError(
            f"{source.name}: {label} has no norm in front of its linears", 'set transform.rotate to "none"'
        )
    for fold in (fold for fold in folds if not fold.is_norm):
        _rotate_heads(fold, head_dim, edits, layer, hidden, call)
    for name, linear in linears.items():
        if linear.out_features == len(q) and name not in read:
            for leaf, _ in linear.named_parameters():
                edits.setdefault(f"{name}.{leaf}", []).append(_rows(q))
    return edits, offset


def _rotate_heads(
    fold: Fold, head_dim: int, edits: dict[str, list[Edit]], layer: nn.Module, hidden: Tensor, call: Call
) -> None:
    """Add a rotation of each value head, if the fold is one between v and o: the layer must stay the same function."""
    producer = layer.get_submodule(fold.producer)
    assert isinstance(producer, nn.Linear)
    if producer.out_features % head_dim:
        return
    r = rotation(head_dim, HEAD_SEED).float().to(hidden.device)
    own: dict[str, list[Edit]] = {f"{fold.producer}.{leaf}": [_head_rows(r)] for leaf, _ in producer.named_parameters()}
    own |= {f"{name}.weight": [_head_columns(r)] for name in fold.consumers}
    before = run_layer(layer, hidden, call)
    after = run_layer(_edited_copy(layer, own), hidden, call)
    if (after - before).norm() <= ROTATION_TOLERANCE * (before - hidden).norm():
        for name, todo in own.items():
            edits[name] = todo + edits.get(name, [])


def _outer_edits(
    decoder: Decoder, q: Tensor, offset: float, source: ModelSource
) -> tuple[dict[str, list[Edit]], dict[str, str], Any]:
    """Edits outside the layers; a tied lm_head gets a tensor of its own."""
    model = decoder.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    names = {id(module): name for name, module in decoder.non_layer_modules()}
    names |= {id(head): next(name for name, module in model.named_modules() if module is head)}
    others = [(name, module) for name, module in decoder.non_layer_modules() if module not in (embedding, head)]
    if len(others) != 1 or getattr(others[0][1], "weight", torch.empty(0, 0)).dim() != 1:
        raise CometError(
            f"{source.name}: beside embedding and lm_head there is more than one final norm "
            f"({', '.join(name for name, _ in others)})",
            'set transform.rotate to "none"',
        )
    norm_name, norm = others[0]
    gain = norm.get_parameter("weight").float() + offset
    first, last = f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight"
    edits: dict[str, list[Edit]] = {
        first: [_columns(torch.ones_like(gain), q)],
        last: [_columns(gain, q)],
        f"{norm_name}.weight": [_constant(1.0 - offset)],
    }
    if not is_tied(model):
        return edits, {}, None
    config = source.config.from_dict({**source.config.to_dict(), "tie_word_embeddings": False})
    return edits, {last: first}, config


def _edited_copy(layer: nn.Module, edits: dict[str, list[Edit]]) -> nn.Module:
    twin = copy.deepcopy(layer)
    for name, todo in edits.items():
        owner, _, leaf = name.rpartition(".")
        value = twin.get_submodule(owner).get_parameter(leaf).detach().float()
        for edit in todo:
            value = edit(value)
        setattr(twin.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    return twin


def _check_same(found: Tensor, wanted: Tensor, before: Tensor, label: str) -> None:
    if not bool((found - wanted).norm() <= ROTATION_TOLERANCE * (wanted - before).norm()):
        raise CometError(
            f"{label} is another function once its hidden states are rotated, so this family cannot carry a rotation",
            'set transform.rotate to "none"; activations.hadamard rotates blocks of 128 in any model',
        )


def _by_rows(value: Tensor, matrix: Tensor) -> Tensor:
    """value @ matrix on the matrix's device, some rows at a time, back where the value was."""
    parts: Sequence[Tensor] = value.split(ROWS_AT_ONCE)
    return torch.cat([(part.to(matrix.device) @ matrix).to(value.device) for part in parts])


def _constant(number: float) -> Edit:
    return lambda value: torch.full_like(value, number)


def _columns(gain: Tensor, q: Tensor) -> Edit:
    """W diag(gain) Q."""
    return lambda value: _by_rows(value, gain[:, None] * q)


def _rows(q: Tensor) -> Edit:
    """Q^T W, and b Q for a bias."""
    return lambda value: _by_rows(value[None], q)[0] if value.dim() == 1 else _by_rows(value.T.contiguous(), q).T


def _head_rows(r: Tensor) -> Edit:
    """R^T on the rows of each head."""
    size = len(r)
    return lambda value: (r.T.to(value.device) @ value.reshape(-1, size, value[0].numel())).reshape(value.shape)


def _head_columns(r: Tensor) -> Edit:
    """R on the columns of each head."""
    size = len(r)
    return lambda value: (value.unflatten(1, (-1, size)) @ r.to(value.device)).flatten(1)
