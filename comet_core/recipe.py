"""YAML -> Recipe: every choice of a quantization run as one frozen value that is checked once, when it is made.

A recipe file states only what differs from the defaults below. `Recipe.for_linear(name)` answers the one question that
the algorithm asks: how is this linear quantized, overrides and skips applied. Keys, units and defaults are explained
in recipes/README.md.
"""

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from comet_core.recipe_rules import (
    check_fields,
    check_keys,
    flag,
    nearest_hint,
    number,
    one_of,
    parse_yaml,
    patterns,
    text,
    whole,
)
from comet_cuda.errors import CometError


@dataclass(frozen=True)
class CalibrationSpec:
    """Which text the statistics come from."""

    data: str = text("c4")  # corpus name, file or hub data set
    samples: int = whole(128, 1, 1_000_000)  # windows
    seq_len: int = whole(2048, 2, 1_048_576)  # tokens a window
    seed: int = whole(0, 0, 2**63 - 1)

    def __post_init__(self) -> None:
        check_fields(self, "calibration")


@dataclass(frozen=True)
class TransformSpec:
    """Changes to the model that keep its function, made before it is quantized."""

    rotate: str = one_of("none", "residual")
    smooth: str = one_of("none", "smoothquant", "awq")
    alpha: float = number(0.5, 0, 1)  # smoothquant's exponent
    clip: str = one_of("none", "learned")

    def __post_init__(self) -> None:
        check_fields(self, "transform")


@dataclass(frozen=True)
class WeightSpec:
    """How a weight becomes codes. 16 bits: the linear stays as it is."""

    bits: int = one_of(4, 8, 16)
    symmetric: bool = flag(False)
    method: str = one_of("gptq", "rtn")
    clip_search: bool = flag(True)
    damping: float = number(0.1, 0, 1, open_low=True)  # share of the mean Hessian diagonal
    token_weighting: str = one_of("inverse_norm", "none")
    first_token: float = number(64.0, 1, 1_000_000)  # tokens that the first one of a window counts for
    holdout: float = number(0.125, 0, 0.5)  # share of the calibration windows
    group: str = one_of("block", "row")  # what shares one scale and zero point of a row
    inputs: str = one_of("exact", "quantized")  # what GPTQ multiplies: inputs as they are, or as their codes
    target: str = one_of("weights", "own", "sixteen")  # what GPTQ approximates
    compensation: float = number(1.0, 0, 1)  # share of the way from the weights to the target's best weights
    passes: int = whole(0, 0, 20)  # of coordinate descent after GPTQ

    def __post_init__(self) -> None:
        check_fields(self, "weights")
        if self.bits == 8:  # 8-bit weights exist in symmetric form only, so no later code need ask
            object.__setattr__(self, "symmetric", True)


@dataclass(frozen=True)
class ActivationSpec:
    """How the input of a linear becomes codes, per token and block."""

    bits: int = one_of(4, 8, 16)  # of the blocks that are not outlier blocks
    clip: float = number(0.9, 0, 1, open_low=True)  # share of absmax that code 7 stands for (INT4 blocks)
    hadamard: bool = flag(True)  # rotate INT4 blocks
    clip_search: bool = flag(False)  # per INT4 block, around `clip`, by output error
    share: int | str = one_of("token", 1)  # blocks whose scales are tied to each other

    def __post_init__(self) -> None:
        check_fields(self, "activations")


@dataclass(frozen=True)
class BlockSpec:
    """Which channels share a block, and which blocks stay in 8 bit."""

    permute: bool = flag(True)
    order: str = one_of("absmax", "hessian")
    rule: str = one_of("budget", "threshold", "first", "none")
    int4_mac_fraction: float = number(0.84, 0, 1)  # of the multiply-adds of the whole model, at least
    threshold: float = number(8.0, 1, 1_000_000)  # times the median channel absmax of the group
    tp_granularity: int = whole(1, 1, 64)  # tensor-parallel degrees that divide it can be served
    row_parallel: tuple[str, ...] = patterns(
        "*.o_proj", "*.down_proj", "*.out_proj", "*.fc2", "*.dense_4h_to_h", "*.dense"
    )

    def __post_init__(self) -> None:
        check_fields(self, "blocks")


@dataclass(frozen=True)
class KVCacheSpec:
    """How keys and values are kept."""

    bits: int = one_of(4, 16)
    key_granularity: str = one_of("channel", "token")
    page: int = whole(128, 16, 1024, multiple=16)  # tokens
    sinks: int = whole(4, 0, 256)  # leading tokens kept in 16 bit

    def __post_init__(self) -> None:
        check_fields(self, "kv_cache")


@dataclass(frozen=True)
class TuningSpec:
    """Distillation of the packed model from the 16-bit one; 0 epochs: none."""

    epochs: int = whole(0, 0, 100)
    windows: int = whole(4, 1, 4096)  # calibration windows a step
    learning_rate: float = number(0.002, 0, 1)  # of scales, relative to their size, a step
    vector_rate: float = number(0.002, 0, 1)  # of norms and biases, likewise
    code_rate: float = number(0.0, 0, 1)  # of weight codes, in code steps

    def __post_init__(self) -> None:
        check_fields(self, "tuning")
        if self.epochs and not (self.learning_rate or self.vector_rate or self.code_rate):
            raise CometError("recipe: tuning has epochs, but all its rates are 0", "Set one of them, or epochs to 0.")


@dataclass(frozen=True)
class ChecksSpec:
    """Beyond which packing warns. No value changes a packed weight."""

    error: float = number(0.5, 0, 1_000_000, open_low=True)  # of a linear's or layer's output energy
    cosine: float = number(0.9, -1, 1)  # of a layer's output to the 16-bit one, mean over tokens

    def __post_init__(self) -> None:
        check_fields(self, "checks")


@dataclass(frozen=True)
class _BitsSpec:
    bits: int = one_of(16, 8)


LINEAR_SECTIONS: dict[str, type[WeightSpec] | type[ActivationSpec] | type[BlockSpec]] = {
    "weights": WeightSpec,
    "activations": ActivationSpec,
    "blocks": BlockSpec,
}
WHOLE_MODEL_KEYS = ("int4_mac_fraction", "tp_granularity", "row_parallel")  # of blocks; an override cannot hold them


@dataclass(frozen=True)
class Override:
    """What differs for the linears whose name fits `match`; a section is (key, value) pairs, empty if untouched."""

    match: str
    weights: tuple[tuple[str, Any], ...] = ()
    activations: tuple[tuple[str, Any], ...] = ()
    blocks: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class LinearSpec:
    """How one linear is quantized."""

    weights: WeightSpec
    activations: ActivationSpec
    blocks: BlockSpec

    @property
    def kept(self) -> bool:
        """True if the linear stays in 16 bit."""
        return self.weights.bits == 16


@dataclass(frozen=True)
class Recipe:
    """Every choice of one run. Build it with `load_recipe` or `recipe_from_dict`; `dataclasses.replace` checks too."""

    name: str = text("unnamed")
    description: str = text("no description")
    calibration: CalibrationSpec = CalibrationSpec()
    transform: TransformSpec = TransformSpec()
    weights: WeightSpec = WeightSpec()
    activations: ActivationSpec = ActivationSpec()
    blocks: BlockSpec = BlockSpec()
    kv_cache: KVCacheSpec = KVCacheSpec()
    tuning: TuningSpec = TuningSpec()
    checks: ChecksSpec = ChecksSpec()
    embedding_bits: int = one_of(16, 8)
    lm_head_bits: int = one_of(16, 8)
    skip: tuple[str, ...] = patterns()
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.weights.bits == 16 and self.activations.bits != 16:
            raise CometError(
                f"recipe {self.name}: weights.bits is 16 but activations.bits is {self.activations.bits}",
                "A 16-bit weight is multiplied with 16-bit activations: set activations.bits to 16.",
            )
        if self.blocks.tp_granularity > 1 and not self.blocks.row_parallel:
            raise CometError(
                f"recipe {self.name}: blocks.tp_granularity is {self.blocks.tp_granularity}, row_parallel is empty",
                "Name the linears whose input is split over GPUs in blocks.row_parallel, or set tp_granularity to 1.",
            )

    def for_linear(self, name: str) -> LinearSpec:
        """How the linear called `name` (for example model.layers.3.mlp.down_proj) is quantized.

        Per section the first override whose pattern fits and that holds the section counts. A skipped linear, or one
        whose weights an override sets to 16 bit, has 16-bit activations too. One scale a token needs 4-bit weights with
        a scale a block; elsewhere each block has its own.
        """
        specs: dict[str, Any] = {}
        for section in LINEAR_SECTIONS:
            fitting = (getattr(o, section) for o in self.overrides if fnmatchcase(name, o.match))
            changes = dict(next(filter(None, fitting), ()))
            specs[section] = dataclasses.replace(getattr(self, section), **changes)
        if any(fnmatchcase(name, pattern) for pattern in self.skip):
            specs["weights"] = dataclasses.replace(specs["weights"], bits=16)
        if specs["weights"].bits == 16:
            specs["activations"] = dataclasses.replace(specs["activations"], bits=16)
        weights, activations = specs["weights"], specs["activations"]
        if activations.bits == 4 and activations.share == "token" and (weights.bits != 4 or weights.group != "block"):
            specs["activations"] = dataclasses.replace(activations, share=1)
        return LinearSpec(**specs)


_SECTIONS: dict[str, type[Any]] = {
    "calibration": CalibrationSpec,
    "transform": TransformSpec,
    **LINEAR_SECTIONS,
    "kv_cache": KVCacheSpec,
    "tuning": TuningSpec,
    "checks": ChecksSpec,
}
_BITS_SECTIONS = ("embedding", "lm_head")
_TOP_KEYS = ("name", "description", *_SECTIONS, *_BITS_SECTIONS, "skip", "overrides")


def _checked_section(cls: type[Any], given: Any, path: str) -> dict[str, Any]:
    """The keys that a file gives for one section, each checked by its rule under the full path."""
    rules = {field.name: field.metadata["rule"] for field in dataclasses.fields(cls)}
    values = check_keys({} if given is None else given, rules, path)
    return {key: rules[key].apply(value, f"{path}.{key}") for key, value in values.items()}


def _override(given: Any, path: str) -> Override:
    values = check_keys(given, ("match", *LINEAR_SECTIONS), path)
    match = values.get("match")
    if not isinstance(match, str) or not match:
        raise CometError(
            f"recipe: {path}.match is {match!r}", 'It must be a name pattern, for example "model.layers.0.*".'
        )
    sections: dict[str, tuple[tuple[str, Any], ...]] = {}
    for section, cls in LINEAR_SECTIONS.items():
        changes = _checked_section(cls, values.get(section), f"{path}.{section}")
        for key in WHOLE_MODEL_KEYS:
            if key in changes:
                raise CometError(
                    f"recipe: {path}.{section}.{key} cannot differ between linears",
                    f"Set {section}.{key} for the whole recipe.",
                )
        sections[section] = tuple(sorted(changes.items()))
    if not any(sections.values()):
        raise CometError(f"recipe: {path} changes nothing", "Give it a weights, activations or blocks section.")
    return Override(match=match, **sections)


def recipe_from_dict(given: Mapping[str, Any]) -> Recipe:
    """A plain mapping (parsed YAML or JSON) as a checked Recipe; missing keys take their defaults.

    Raises:
        CometError: unknown key, wrong type or value out of range, with the key's path.
    """
    values = check_keys(given, _TOP_KEYS, "")
    fields: dict[str, Any] = {key: values[key] for key in ("name", "description", "skip") if key in values}
    for section, cls in _SECTIONS.items():
        fields[section] = cls(**_checked_section(cls, values.get(section), section))
    for section in _BITS_SECTIONS:
        bits = _checked_section(_BitsSpec, values.get(section), section)
        if bits:
            fields[f"{section}_bits"] = bits["bits"]
    overrides = values.get("overrides") or []
    if not isinstance(overrides, list | tuple):
        raise CometError(
            f"recipe: overrides is {overrides!r}", "overrides must be a list; each item has a match pattern."
        )
    fields["overrides"] = tuple(_override(item, f"overrides[{i}]") for i, item in enumerate(overrides))
    return Recipe(**fields)


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """The whole recipe, defaults included, as plain JSON and YAML values: `recipe_from_dict` gives the same recipe."""
    plain: dict[str, Any] = {"name": recipe.name, "description": recipe.description}
    for section in _SECTIONS:
        values = dataclasses.asdict(getattr(recipe, section))
        plain[section] = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    plain["embedding"], plain["lm_head"] = {"bits": recipe.embedding_bits}, {"bits": recipe.lm_head_bits}
    plain["skip"] = list(recipe.skip)
    plain["overrides"] = [
        {"match": o.match, **{s: dict(getattr(o, s)) for s in LINEAR_SECTIONS if getattr(o, s)}}
        for o in recipe.overrides
    ]
    return plain


def digest(recipe: Recipe) -> str:
    """First 16 hex digits of the sha256 over the recipe's canonical JSON: equal recipes, equal digests. Limits at their
    defaults are left out: they change no weight, and recipes from before there were any keep their digests."""
    plain = recipe_to_dict(recipe)
    if recipe.checks == ChecksSpec():
        del plain["checks"]
    if not recipe.tuning.epochs:
        del plain["tuning"]["vector_rate"]
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def with_calibration(
    recipe: Recipe,
    data: str | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
) -> Recipe:
    """The recipe with those calibration keys replaced that are not None (command line flags)."""
    given: dict[str, Any] = {"data": data, "samples": samples, "seq_len": seq_len, "seed": seed}
    changes = {key: value for key, value in given.items() if value is not None}
    return dataclasses.replace(recipe, calibration=dataclasses.replace(recipe.calibration, **changes))


def recipe_folder() -> Path:
    """The folder of the recipes that come with COMET: beside this package, or `comet_recipes` of an installed wheel."""
    beside = Path(__file__).resolve().parent.parent / "recipes"
    if (beside / "README.md").is_file():
        return beside
    installed = importlib.util.find_spec("comet_recipes")
    if installed is not None and installed.submodule_search_locations:
        return Path(next(iter(installed.submodule_search_locations)))
    raise CometError(
        "the recipes that come with COMET are not installed", "Give a recipe file: --recipe path/to/file.yaml"
    )


def recipe_names() -> list[str]:
    """Names that `load_recipe` knows, sorted; those in subfolders as folder/name. `paper` holds tables, not recipes."""
    folder = recipe_folder()
    found = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
    return sorted(path.as_posix() for path in found if path.parts[0] != "paper")


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Reads a recipe that comes with COMET by name (w4a4kv4), or a YAML file by path.

    Raises:
        CometError: no such recipe (lists the names), or the file is no valid recipe (names the file and the key).
    """
    given = Path(name_or_path)
    if given.suffix in (".yaml", ".yml"):
        path = given
    else:
        path = recipe_folder() / f"{name_or_path}.yaml"
        if str(name_or_path) not in recipe_names():
            hint = nearest_hint(str(name_or_path), recipe_names())
            raise CometError(
                f"no recipe is called {name_or_path}", f"{hint} A file is given by a path that ends in .yaml."
            )
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CometError(
            f"cannot read the recipe {path}: {error}", "Check the path and that it is a text file."
        ) from None
    parsed = parse_yaml(content, path)
    parsed = {} if parsed is None else parsed  # an empty file: all defaults
    try:
        return recipe_from_dict({"name": path.stem, **parsed} if isinstance(parsed, dict) else parsed)
    except CometError as error:
        raise CometError(f"{path}: {error.message}", error.hint) from None
