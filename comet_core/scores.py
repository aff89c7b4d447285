"""Token windows -> log-probabilities, a few rows at a time, so that no window's logits exist at once."""

import torch
from torch import Tensor, nn

from comet_cuda.errors import CometError


class _Seen(Exception):
    """The hidden states have been captured."""


def final_hidden(model: nn.Module, tokens: Tensor) -> Tensor:
    """What enters lm_head before each token but the first, [batch * (L - 1), D]: captured by a hook, so that logits
    never exist for whole windows."""
    seen: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0][:, :-1].flatten(0, 1))
        raise _Seen

    handle = model.get_output_embeddings().register_forward_pre_hook(see)  # type: ignore[operator]
    try:
        model(input_ids=tokens, use_cache=False)
    except _Seen:
        pass
    finally:
        handle.remove()
    return seen[0]


def log_probabilities(model: nn.Module, hidden: Tensor) -> Tensor:
    """float32 log-probabilities [rows, V], the model's own soft cap applied."""
    logits = model.get_output_embeddings()(hidden).float()  # type: ignore[operator]
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    scale = getattr(model.config, "logits_scaling", None) or getattr(model.config, "logit_scale", None)
    if scale is not None and scale != 1:
        raise CometError(f"{type(model).__name__}: scales its logits by {scale}, which is not supported in evaluation")
    return torch.log_softmax(logits, -1)
