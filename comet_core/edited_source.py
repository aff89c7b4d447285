"""A ModelSource whose weights are changed as they are read: what a transformation made, without a second copy.

An Edit is a function of one parameter, float32 in and out. Edits of one name are applied in order. The changed model
has the base's tokenizer and name, and a digest of its own.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from comet_core.model_source import ModelSource
from comet_core.weight_reader import WeightReader

Edit = Callable[[Tensor], Tensor]


class EditedReader:
    """A WeightReader that applies edits; `sources` says which stored parameter a name without one of its own reads."""

    def __init__(self, base: WeightReader, edits: Mapping[str, Sequence[Edit]], sources: Mapping[str, str]) -> None:
        self._base, self._edits, self._sources = base, edits, sources

    def names(self) -> list[str]:
        return [*self._base.names(), *self._sources]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(self._sources.get(name, name))

    def load(self, name: str) -> Tensor:
        value = self._base.load(self._sources.get(name, name))
        for edit in self._edits.get(name, ()):
            value = edit(value.float())
        return value


@dataclass(frozen=True)
class EditedSource(ModelSource):
    """The model after edits."""

    base: ModelSource = dataclasses.field(kw_only=True)
    reader: EditedReader = dataclasses.field(kw_only=True)
    change: str = dataclasses.field(kw_only=True)  # what was done, and to what: decides the digest

    def weights(self) -> WeightReader:
        """The reader of the changed parameters."""
        return self.reader

    def digest(self) -> str:
        """First 16 hex digits of a sha256 over the base's digest and the change."""
        return hashlib.sha256(f"{self.base.digest()} {self.change}".encode()).hexdigest()[:16]


def edited(
    base: ModelSource,
    edits: Mapping[str, Sequence[Edit]],
    change: str,
    *,
    config: Any = None,
    sources: Mapping[str, str] | None = None,
) -> EditedSource:
    """The model `base` with edited parameters.

    Args:
        edits: by parameter name, functions float32 -> float32. change: words and settings that decide the digest.
        config: another one than the base's, where ties break. sources: stored parameter by new name, then.
    """
    reader = EditedReader(base.weights(), edits, sources or {})
    return EditedSource(
        name=base.name,
        folder=base.folder,
        config=base.config if config is None else config,
        random_seed=base.random_seed,
        origin=base.origin,
        note=base.note,
        base=base,
        reader=reader,
        change=change,
    )
