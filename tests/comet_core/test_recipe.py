"""Recipes: what comes with COMET is valid, mistakes are named with path and remedy, overrides and digests hold."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comet_core import recipe as r
from comet_cuda.errors import CometError

SHIPPED = [
    "fmpq-paper",
    "fp16",
    "w4a16",
    "w4a16-tuned",
    "w4a4-naive",
    "w4a4kv4",
    "w4a4kv4-free",
    "w4a4kv4-tuned",
    "w4a8kv4",
    "w8a8",
]


def test_the_shipped_recipes_load_and_carry_their_file_name():
    assert set(SHIPPED) <= set(r.recipe_names())
    for name in r.recipe_names():
        assert r.load_recipe(name).name == name.rsplit("/", 1)[-1]


def test_the_default_recipe_is_the_defaults():
    loaded = r.load_recipe("w4a4kv4")
    assert dataclasses.replace(loaded, name="unnamed", description="no description") == r.Recipe()


def test_what_the_other_recipes_promise():
    paper, naive, w4a16, w8a8, fp16 = map(r.load_recipe, ["fmpq-paper", "w4a4-naive", "w4a16", "w8a8", "fp16"])
    assert paper.blocks.int4_mac_fraction == 0.84 and paper.weights.method == "rtn" and not paper.weights.symmetric
    assert not paper.activations.hadamard and paper.activations.clip == 1.0 and paper.kv_cache.bits == 4
    assert not naive.blocks.permute and naive.blocks.rule == "none"
    assert naive.kv_cache == r.load_recipe("w4a4kv4").kv_cache
    assert (w4a16.weights.bits, w4a16.activations.bits, w4a16.kv_cache.bits) == (4, 16, 16)
    assert (w8a8.weights.bits, w8a8.activations.bits, w8a8.weights.symmetric) == (8, 8, True)
    assert fp16.for_linear("model.layers.0.mlp.up_proj").kept


@pytest.mark.parametrize("name", SHIPPED)
def test_dict_round_trip_keeps_recipe_and_digest(name):
    recipe = r.load_recipe(name)
    again = r.recipe_from_dict(r.recipe_to_dict(recipe))
    assert again == recipe and r.digest(again) == r.digest(recipe)


def test_the_digest_is_the_same_for_ever():
    assert r.digest(r.Recipe()) == "68fd90001d552395"  # changes with a default or a key, as when activations.unit went
    assert len({r.digest(r.load_recipe(name)) for name in SHIPPED}) == len(SHIPPED)


@pytest.mark.parametrize(
    ("given_dict", "named", "hint"),
    [
        ({"weight": {}}, "unknown key weight", "Did you mean weights?"),
        ({"weights": {"symetric": True}}, "unknown key weights.symetric", "Did you mean symmetric?"),
        ({"overrides": [{"match": "*", "weights": {"bit": 4}}]}, "overrides[0].weights.bit", "Did you mean bits?"),
        ({"overrides": [{"match": "*", "kv_cache": {"bits": 4}}]}, "overrides[0].kv_cache", "Known:"),
        ({"weights": {"bits": 5}}, "weights.bits is 5", "one of 4, 8, 16"),
        ({"weights": {"bits": "4"}}, "weights.bits is '4'", "one of 4, 8, 16"),
        ({"weights": {"bits": True}}, "weights.bits is True", "one of"),
        ({"weights": {"symmetric": "no"}}, "weights.symmetric is 'no'", "true or false"),
        ({"weights": {"method": "awq"}}, "weights.method is 'awq'", "gptq, rtn"),
        ({"weights": {"damping": "1e-2"}}, "weights.damping is '1e-2'", "1.0e-2"),
        ({"weights": {"damping": 0}}, "weights.damping is 0", "above 0"),
        ({"activations": {"clip": float("nan")}}, "activations.clip is nan", "above 0 to 1"),
        ({"activations": {"clip": 1.01}}, "activations.clip is 1.01", "above 0 to 1"),
        ({"blocks": {"int4_mac_fraction": 84}}, "blocks.int4_mac_fraction is 84", "from 0 to 1"),
        ({"blocks": {"row_parallel": "*.o_proj"}}, "blocks.row_parallel", "list"),
        ({"kv_cache": {"page": 40}}, "kv_cache.page is 40", "multiple of 16"),
        ({"kv_cache": 4}, "kv_cache is 4", "table"),
        ({"embedding": {"bits": 4}}, "embedding.bits is 4", "16, 8"),
        ({"calibration": {"samples": 0}}, "calibration.samples is 0", "whole number"),
        ({"skip": [3]}, "skip is [3]", "patterns"),
        ({"overrides": [{"weights": {"bits": 8}}]}, "overrides[0].match is None", "pattern"),
        ({"overrides": [{"match": "*"}]}, "overrides[0] changes nothing", "section"),
        ({"overrides": {"match": "*"}}, "overrides is", "list"),
        ({"overrides": [{"match": "*", "blocks": {"tp_granularity": 2}}]}, "cannot differ", "whole recipe"),
        ({"weights": {"bits": 16}}, "activations.bits is 4", "set activations.bits to 16"),
        ({"blocks": {"tp_granularity": 2, "row_parallel": []}}, "row_parallel is empty", "Name the linears"),
    ],
)
def test_a_mistake_is_named_with_its_path_and_a_remedy(given_dict, named, hint):
    with pytest.raises(CometError) as caught:
        r.recipe_from_dict(given_dict)
    assert named in caught.value.message
    assert hint in caught.value.hint


def test_values_are_checked_at_birth_in_code_too():
    with pytest.raises(CometError, match="weights.holdout is 0.7"):
        r.WeightSpec(holdout=0.7)
    with pytest.raises(CometError, match="activations.bits is 5"):
        dataclasses.replace(r.ActivationSpec(), bits=5)


def test_eight_bit_weights_are_symmetric_also_through_an_override():
    recipe = r.recipe_from_dict({"overrides": [{"match": "*.o_proj", "weights": {"bits": 8}}]})
    assert recipe.for_linear("model.layers.0.self_attn.o_proj").weights.symmetric
    assert not recipe.for_linear("model.layers.0.self_attn.q_proj").weights.symmetric


def test_first_matching_override_wins_per_section_and_skip_wins_over_all():
    recipe = r.recipe_from_dict(
        {
            "skip": ["*.layers.3.*"],
            "overrides": [
                {"match": "*.layers.0.*", "activations": {"bits": 8}},
                {"match": "*.down_proj", "activations": {"bits": 16}, "weights": {"method": "rtn"}},
                {"match": "*.up_proj", "weights": {"bits": 16}},
            ],
        }
    )
    first = recipe.for_linear("model.layers.0.mlp.down_proj")
    assert (first.activations.bits, first.weights.method) == (8, "rtn")
    assert recipe.for_linear("model.layers.1.mlp.down_proj").activations.bits == 16
    plain = recipe.for_linear("model.layers.1.mlp.gate_proj")
    assert (plain.weights, plain.activations, plain.blocks) == (recipe.weights, recipe.activations, recipe.blocks)
    for kept in ("model.layers.3.mlp.down_proj", "model.layers.1.mlp.up_proj"):
        assert recipe.for_linear(kept).kept and recipe.for_linear(kept).activations.bits == 16


def test_command_line_flags_replace_calibration_keys():
    recipe = r.with_calibration(r.Recipe(), samples=8, seed=3)
    assert recipe.calibration == r.CalibrationSpec(samples=8, seed=3)
    assert r.digest(recipe) != r.digest(r.Recipe())
    assert r.with_calibration(r.Recipe()) == r.Recipe()
    with pytest.raises(CometError, match="calibration.seq_len is 1"):
        r.with_calibration(r.Recipe(), seq_len=1)


def test_an_unknown_name_lists_the_names_and_the_nearest():
    with pytest.raises(CometError) as caught:
        r.load_recipe("w4a4-kv4")
    assert "Did you mean w4a4kv4?" in caught.value.hint and "fmpq-paper" in caught.value.hint
    with pytest.raises(CometError, match="no recipe is called ../recipes/fp16"):
        r.load_recipe("../recipes/fp16")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("weights: {bits: 4", "not valid YAML"),
        ("weights:\n  bits: 4\n  bits: 8\n", "key bits twice"),
        ("- 1\n", "the recipe is"),
        ("weights: {bits: 3}", "weights.bits is 3"),
        ("weights: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(CometError, match=message) as caught:
        r.load_recipe(path)
    assert "mine.yaml" in caught.value.message


def test_files_by_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("weights: {method: rtn}\n")
    assert r.load_recipe(path).name == "mine" and r.load_recipe(str(path)).weights.method == "rtn"
    path.write_text("")
    assert r.load_recipe(path) == dataclasses.replace(r.Recipe(), name="mine")
    with pytest.raises(CometError, match=r"cannot read the recipe .*absent\.yaml"):
        r.load_recipe(tmp_path / "absent.yaml")
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(CometError, match="cannot read the recipe"):
        r.load_recipe(path)


def test_the_readme_explains_every_key_with_its_default():
    lines = (Path(r.recipe_folder()) / "README.md").read_text().splitlines()
    section, rows = "", {}
    for line in lines:
        if match := re.match(r"### `(\w+)`", line):
            section = match[1]
        elif line.startswith("### Top"):
            section = ""
        elif match := re.match(r"\| `([\w.]+)` \| ([^|]+) \| ([^|]+) \|", line):
            rows[(section, match[1])] = match[3].strip().strip("`")
    for name, cls in {"calibration": r.CalibrationSpec, **r.LINEAR_SECTIONS, "kv_cache": r.KVCacheSpec}.items():
        for field in dataclasses.fields(cls):
            shown = rows[(name, field.name)]
            if isinstance(field.default, tuple):
                assert re.findall(r"[*.\w]+", shown) == list(field.default)
            else:
                assert shown == str(field.default).lower(), (name, field.name)
    documented = {key for _, key in rows}
    assert {"name", "description", "skip", "overrides", "embedding.bits", "lm_head.bits"} <= documented
    for name in SHIPPED:
        assert any(line.startswith(f"| `{name}` |") for line in lines)


def test_importing_recipes_needs_no_torch():
    code = "import sys, comet_core.recipe as r; r.load_recipe('w4a4kv4'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["weights", "bits", "blocks", "threshold", "overrides", "match", "skip", "x"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=6,
    )
)
def test_any_plain_value_gives_a_recipe_or_a_comet_error(value):
    try:
        recipe = r.recipe_from_dict(value)
    except CometError as error:
        assert error.message and error.hint
    else:
        assert r.recipe_from_dict(r.recipe_to_dict(recipe)) == recipe
