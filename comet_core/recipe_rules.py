"""What a recipe key may hold: each dataclass field carries one Rule that checks a value and says what is allowed.

The field helpers below (`one_of`, `number`, ...) are how recipe.py declares a key; its type, default and limits then
stand on one line, and YAML reading, `replace` in code and the README test all read the same rule.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comet_cuda.errors import CometError


@dataclass(frozen=True)
class Rule:
    """`convert` returns the value to store or raises ValueError; `allowed` finishes the sentence "must be ..."."""

    allowed: str
    convert: Callable[[Any], Any]

    def apply(self, value: Any, path: str) -> Any:
        """The stored form of `value`, or a CometError that names `path`, the value and what is allowed."""
        try:
            return self.convert(value)
        except ValueError:
            hint = f"{path} must be {self.allowed}."
            if isinstance(value, str) and "number" in self.allowed:
                hint += " YAML reads quoted numbers and forms such as 1e-2 as text: write 0.01 or 1.0e-2."
            raise CometError(f"recipe: {path} is {value!r}", hint) from None


def _key(default: Any, allowed: str, convert: Callable[[Any], Any]) -> Any:
    return dataclasses.field(default=default, metadata={"rule": Rule(allowed, convert)})


def _require(ok: bool, value: Any) -> Any:
    if not ok:
        raise ValueError
    return value


def one_of(default: str | int, *others: str | int) -> Any:
    """A key that takes one of a few words or numbers, the first of which is the default."""
    choices = (default, *others)

    def convert(value: Any) -> Any:
        return _require(any(type(value) is type(choice) and value == choice for choice in choices), value)

    return _key(default, "one of " + ", ".join(map(str, choices)), convert)


def flag(default: bool) -> Any:
    """A key that is true or false."""
    return _key(default, "true or false", lambda value: _require(isinstance(value, bool), value))


def text(default: str) -> Any:
    """A key that holds a non-empty text."""
    return _key(default, "a text", lambda value: _require(isinstance(value, str) and bool(value.strip()), value))


def whole(default: int, low: int, high: int, multiple: int = 1) -> Any:
    """A key that holds a whole number in [low, high], a multiple of `multiple`."""

    def convert(value: Any) -> Any:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return _require(is_whole and low <= value <= high and value % multiple == 0, value)

    allowed = f"a whole number from {low} to {high}" + (f", a multiple of {multiple}" if multiple > 1 else "")
    return _key(default, allowed, convert)


def number(default: float, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> Any:
    """A key that holds a number in [low, high]; an open end excludes the limit itself."""

    def convert(value: Any) -> Any:
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ok = ok and (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
        return float(_require(ok, value))

    left, right = ("above" if open_low else "from"), ("below" if open_high else "to")
    return _key(default, f"a number {left} {low:g} {right} {high:g}", convert)


def patterns(*default: str) -> Any:
    """A key that holds a list of module name patterns (shell style: * ? [abc])."""

    def convert(value: Any) -> Any:
        ok = isinstance(value, list | tuple) and all(isinstance(item, str) and item for item in value)
        return tuple(_require(ok, value))

    return _key(default, "a list of name patterns", convert)


def check_fields(spec: Any, path: str) -> None:
    """Applies each field's rule to a freshly built frozen dataclass and stores the converted value."""
    prefix = f"{path}." if path else ""
    for field in dataclasses.fields(spec):
        rule = field.metadata.get("rule")
        if rule is not None:
            object.__setattr__(spec, field.name, rule.apply(getattr(spec, field.name), prefix + field.name))


def check_keys(given: Any, known: Iterable[str], path: str) -> Mapping[str, Any]:
    """`given` as a mapping whose keys are all in `known`; else a CometError with the key's path and the nearest one."""
    where = path or "the recipe"
    if not isinstance(given, Mapping):
        raise CometError(f"recipe: {where} is {given!r}", f"{where} must be a table of keys and values.")
    names = list(known)
    for key in given:
        if key not in names:
            full = f"{path}.{key}" if path else str(key)
            raise CometError(f"recipe: unknown key {full}", nearest_hint(str(key), names))
    return given


def nearest_hint(word: str, known: Iterable[str]) -> str:
    """ "Did you mean X? Known: ..." for an unknown word."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return (f"Did you mean {near[0]}? " if near else "") + "Known: " + ", ".join(names) + "."


def parse_yaml(content: str, path: Path) -> Any:
    """Safe YAML in which a key given twice is an error, not a silent choice of the last one."""
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"key {key.value} twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(content, UniqueKeyLoader)  # a SafeLoader: builds plain values only
    except yaml.YAMLError as error:
        raise CometError(f"{path} is not valid YAML: {' '.join(str(error).split())}", "Correct the file.") from None
