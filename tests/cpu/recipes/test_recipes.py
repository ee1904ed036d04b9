"""Engine recipes: every committed one is valid, and what is wrong is named with its line."""

import argparse
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvforge.checkpoint import open_checkpoint
from kvforge.commands.build_options import add_build_options, given_options
from kvforge.common.dtypes import COMPUTE_DTYPES
from kvforge.common.errors import BuildError
from kvforge.common.number_formats import KV_FORMATS, WEIGHT_BYTES
from kvforge.compiler import BuildOptions
from kvforge.compiler.options import resolve
from kvforge.compiler.recipe import KEYS, Recipe, load_recipe
from kvforge.compiler.targets import HOSTED, TARGETS
from model_defs import load_config

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted((ROOT / "build" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_committed_recipes_are_valid(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.checkpoint is not None and recipe.output is not None and recipe.cut is not None
    assert recipe.options.target in path.stem
    checkpoint = ROOT / recipe.checkpoint
    if checkpoint.is_relative_to(ROOT / "model_defs"):
        recipe.check_checkpoint(checkpoint)
        resolve(recipe.options, load_config(open_checkpoint(checkpoint).hf_config), "BF16")


def test_recipes_are_there_for_every_target() -> None:
    assert {load_recipe(path).options.target for path in RECIPES} == {*TARGETS, *HOSTED}
    assert all(path.suffix == ".yaml" for path in (ROOT / "build" / "recipes").iterdir())


@pytest.mark.parametrize(("key", "names"), [("target", (*TARGETS, *HOSTED)), ("kv_dtype", KV_FORMATS),
                                            ("weight_dtype", WEIGHT_BYTES), ("dtype", COMPUTE_DTYPES)])  # fmt: skip
def test_the_page_names_what_a_key_may_be(key: str, names: Iterable[str]) -> None:
    (row,) = re.findall(rf"^\| `{key}` \| (.*?) \|", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE)
    assert set(re.findall("`(.+?)`", row)) - {"auto"} == set(names)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_every_build_option_is_one_of_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_build_options(parser)
    names = [field.name for field in dataclasses.fields(BuildOptions)]
    assert given_options(parser.parse_args([])) == {}
    assert given_options(argparse.Namespace(**dict.fromkeys(names, 1))) == dict.fromkeys(names, 1)
    assert {action.dest for action in parser._actions} - {"help"} == set(names)


def test_every_build_option_is_a_key_and_reaches_the_options(tmp_path: Path) -> None:
    values = {
        "target": "cuda",
        "dtype": "bf16",
        "weight_dtype": "bf16",
        "kv_dtype": "int8",
        "max_seq_len": 77,
        "early_exit": False,
        "decoupled_mode": False,
        "kv_policy": "shadowkv:rank=64,sparse_budget=1024",
        "engine_python": "vllm-env/bin/python",
        "engine_args": "no JSON yet",
        "copy_checkpoint": True,
        "kv_prediction": "predictor",
        "calibration": "a text",
        "draft_head": "a head",
        "weight_bits": 5.5,
        "kv_scorer": "a scorer",
        "compute_capabilities": "8.9,12.0",
    }
    for index, field in enumerate(dataclasses.fields(BuildOptions)):
        assert field.name in KEYS
        values.setdefault(field.name, 3 + index)
    text = "".join(f"{name}: {value}\n" for name, value in values.items())
    recipe = load_recipe(write(tmp_path, f"checkpoint: a b\ncut: 2\ngroup_size: 3\n{text}"))
    assert recipe.options == BuildOptions(**values)
    assert (recipe.checkpoint, recipe.output, recipe.cut, recipe.group_size) == (Path("a b"), None, 2, 3)
    assert load_recipe(write(tmp_path, "page_size: 16")).options == BuildOptions(page_size=16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target: cpu\nmax_tokens: 5\n", "line 2: unknown key 'max_tokens'; known are checkpoint, output, cut"),
        ("# comment\n\npage_size: many\n", "line 3: page_size must be a whole number, not str 'many'"),
        ("page_size: 3.5\n", "line 1: page_size must be a whole number, not float '3.5'"),
        ("weight_bits: many\n", "line 1: weight_bits must be a number, not str 'many'"),
        ("weight_bits: .nan\n", "line 1: weight_bits must be a number, not '.nan'"),
        ("page_size: true\n", "line 1: page_size must be a whole number, not bool 'true'"),
        ("page_size:\n", "line 1: page_size must be a whole number, not null ''"),
        ("page_size: [1]\n", "line 1: page_size must be a whole number, not a seq"),
        ("target: 5\n", "line 1: target must be text, not int '5'."),
        (
            "compute_capabilities: 8.9\n",
            "line 1: compute_capabilities must be text, not float '8.9'; write it in quotes: '8.9'.",
        ),
        ("target: cpu\ncheckpoint: {a: b}\n", "line 2: checkpoint must be text, not a map"),
        ("checkpoint: ''\n", "line 1: checkpoint is empty"),
        ("target: tpu\n", "line 1: target 'tpu' is unknown; choose from cpu, cuda, tensorrt"),
        ("kv_dtype: nvfp4\n", "line 1: kv_dtype 'nvfp4' is unknown; choose from auto, float32"),
        ("max_num_seqs: 0\n", "line 1: max_num_seqs is 0; it must be at least 1"),
        ("max_draft_len: -1\n", "line 1: max_draft_len is -1; it must be at least 0"),
        (
            "kv_policy: h3o\n",
            "line 1: the KV policy 'h3o' is unknown; choose from adakv, batchmax, expected, fastgen, full, h2o,",
        ),
        ("target: cpu\nkv_policy: shadowkv:r=1\n", "line 2: the KV policy shadowkv has no parameter 'r'; it has rank,"),
        ("kv_policy: {name: shadowkv}\n", "line 1: kv_policy must be text, not a map"),
        ("early_exit: 1\n", "line 1: early_exit must be true or false, not int '1'"),
        ("early_exit: yes\n", "line 1: early_exit must be true or false, not 'yes'"),
        ("cut: 4\ncut: 4\n", "line 2: key 'cut' is given twice"),
        ("target: cpu\n  cut: [\n", "line 2: this is not YAML"),
        ("page_size: !!int abc\n", "line 1: page_size must be a whole number, not 'abc'"),
        ('page_size: !!int ""\n', "line 1: page_size must be a whole number, not ''"),
        (f"page_size: {'9' * 5000}\n", "line 1: page_size must be a whole number, not '999"),
        ("page_size: 4097\n", "line 1: page_size must be at most 4096"),
        (f"cut: {'9' * 4000}\n", "line 1: cut must be at most 2147483647"),
        ('target: cpu\noutput: "a\\0b"\n', "line 2: output holds a character that no path may"),
        ('checkpoint: "\\ud800"\n', "line 1: checkpoint holds a character that no path may"),
        ('checkpoint: "\\U99999999"\n', "this is not a recipe"),
        ("[" * 20000, "this is not a recipe"),
        ("? [a, b]\n: c\n", "line 1: unknown key 'seq'"),
        ("target: \x01\n", "this is not YAML (unacceptable character #x0001: special characters are not allowed)."),
        ("- target\n", "must be a mapping"),
        ("", "must be a mapping"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:
        load_recipe(write(tmp_path, text))
    assert message in str(caught.value) and "recipe.yaml" in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"recipe none\.yaml cannot be read|none\.yaml cannot be read"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"target: \xe9\n")
    with pytest.raises(BuildError, match=r"latin\.yaml cannot be read"):
        load_recipe(tmp_path / "latin.yaml")


@pytest.mark.parametrize(("cut", "group_size", "wrong"), [(4, 2, None), (5, 2, "cut"), (4, 4, "group_size")])
def test_cut_and_group_size_are_held_against_the_model(cut: int, group_size: int, wrong: str | None) -> None:
    config = load_config(open_checkpoint(ROOT / "model_defs" / "assets" / "tiny-swiftkv").hf_config)
    recipe = Recipe(Path("r.yaml"), None, None, cut, group_size, {})
    if wrong is None:
        recipe.check_model(config)
        return
    with pytest.raises(BuildError, match=rf"r\.yaml expects a model with {wrong} \d, but the checkpoint has"):
        recipe.check_model(config)
