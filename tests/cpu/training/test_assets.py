"""The committed tiny models: names, sizes, and the same logits as transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from kvforge.checkpoint import open_checkpoint
from kvforge.swiftkv import SwiftKVForCausalLM, load_model
from kvforge.tasks import DEFAULT_TASKS
from kvforge.tasks.prompt import make_examples
from model_defs import load_config
from perf.training.config import TINY_HF_CONFIG, TINY_MODEL, TINY_STUDENT, TINY_TOKENIZER
from perf.training.tokenizer import train_tokenizer
from tests.support.rounding import assert_near, config_of, model_error

ASSETS = Path(__file__).parents[3] / "model_defs" / "assets"
TEACHER, STUDENT = ASSETS / "tiny-teacher", ASSETS / "tiny-swiftkv"


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def load(directory: Path) -> tuple[SwiftKVForCausalLM, Tokenizer]:
    checkpoint = open_checkpoint(directory)
    model = load_model(checkpoint, load_config(checkpoint.hf_config), torch.float32)
    return model, Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_both_assets_fit_in_28_mb():
    sizes = [path.stat().st_size for directory in (TEACHER, STUDENT) for path in directory.iterdir()]
    assert sum(sizes) <= 28_000_000


def test_weights_are_bf16_and_named_as_in_hugging_face_checkpoints():
    assert {name for name, _ in LlamaForCausalLM(transformers_config()).named_parameters()} == set(tensors(TEACHER))
    for directory in (TEACHER, STUDENT):
        assert {tensor.dtype for tensor in tensors(directory).values()} == {torch.bfloat16}


def transformers_config():
    from transformers import LlamaConfig

    return LlamaConfig.from_pretrained(TEACHER)


def test_student_has_swiftkv_projections_instead_of_the_teachers():
    names, rewire = set(tensors(STUDENT)), TINY_STUDENT.rewire
    cut, group = rewire.cut, rewire.group_size
    config = json.loads((STUDENT / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama_swiftkv", ["LlamaSwiftKVForCausalLM"])
    assert (config["swiftkv"], config["num_key_value_layers"], config["key_value_group_size"]) == (True, 4, 2)
    assert {"model.norm_swiftkv.weight", "model.norm_early_exit.weight", "lm_head_early_exit.weight"} <= names
    for i in range(TINY_MODEL.num_layers):
        prefix = f"model.layers.{i}.self_attn."
        present = {name.removeprefix(prefix).removesuffix(".weight") for name in names if name.startswith(prefix)}
        expected = {"q_proj", "k_proj", "v_proj", "o_proj"}
        if i >= cut:
            expected = {"q_proj_swiftkv", "o_proj"}
            if (i - cut) % group == 0:
                expected |= {"k_proj_swiftkv", "v_proj_swiftkv"}
        assert present == expected


def test_student_shares_the_teachers_other_weights():
    teacher, student = tensors(TEACHER), tensors(STUDENT)
    shared = [name for name in student if "_swiftkv." not in name and "_early_exit." not in name]
    assert len(shared) > 1
    assert all(torch.equal(student[name], teacher[name]) for name in shared)


@pytest.mark.parametrize("directory", [TEACHER, STUDENT], ids=["teacher", "student"])
def test_config_and_tokenizer_are_those_of_the_recipe(directory):
    values = json.loads((directory / "config.json").read_text())
    if directory == TEACHER:
        assert values == TINY_HF_CONFIG
    else:
        added = {key: value for key, value in values.items() if TINY_HF_CONFIG.get(key) != value}
        assert added.keys() == {
            *("architectures", "model_type", "swiftkv", "num_key_value_layers", "key_value_group_size", "early_exit")
        }
    trained = train_tokenizer(TINY_TOKENIZER.vocab_size, TINY_TOKENIZER.seed, TINY_TOKENIZER.num_items)
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).to_str() == trained.to_str()


def test_transformers_reads_the_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    text = "The secret number of the old mill is 4821."
    ids = tokenizer(text).input_ids
    assert (ids[0], tokenizer.eos_token_id) == (tokenizer.bos_token_id, 1)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_transformers_computes_the_same_logits():
    reference = LlamaForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()
    ours, tokenizer = load(TEACHER)
    text = "The baker told a story. The secret number of the old mill is 4821. It rained all day."
    ids = torch.tensor([tokenizer.encode(" ".join([text] * 40)).ids])
    assert ids.shape[1] > 512
    with torch.no_grad():
        for length in (1, 300, ids.shape[1]):
            expected, found = reference(ids[:, :length]).logits, ours(ids[:, :length])
            assert_near(found, expected, model_error(config_of(TEACHER), length))


@pytest.mark.parametrize("directory", [TEACHER, STUDENT], ids=["teacher", "student"])
def test_models_find_single_needles(directory):
    model, tokenizer = load(directory)
    found = 0
    for example in make_examples("needle_single", 299, lambda text: len(tokenizer.encode(text).ids), 10, 5):
        prompt = tokenizer.encode(example.prompt).ids
        answer = tokenizer.encode(f" {example.answer}.", add_special_tokens=False).ids
        with torch.no_grad():
            likeliest = model(torch.tensor([prompt + answer]))[0].argmax(-1)
        found += likeliest[len(prompt) - 1 : -1].tolist() == answer
    assert found >= 8


def test_committed_scores_reach_the_goals():
    """Ten tasks of twelve are learned, so that a loss shows; the student loses little of them."""
    scores = json.loads((ASSETS / "scores.json").read_text())
    teacher, student = (
        {score["task"]: score for score in scores[name] if score["length"] == 1000}
        for name in ("tiny-teacher", "tiny-swiftkv")
    )
    assert set(teacher) == set(student) == set(DEFAULT_TASKS)
    assert sum(score["accuracy"] >= 0.9 for score in teacher.values()) >= 10
    assert all(student[task]["accuracy"] >= score["accuracy"] - 0.03 for task, score in teacher.items())
    assert {score["num_prompts"] for score in (*teacher.values(), *student.values())} == {200}
