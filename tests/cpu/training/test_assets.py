"""The committed tiny models: names, sizes, and the same logits as transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from kvforge.evaluation import evaluate
from kvforge.tasks import TASKS
from kvforge.training.config import TINY_MODEL, TINY_STUDENT, TINY_TOKENIZER
from kvforge.training.export import export_checkpoint, hf_config, load_checkpoint, model_config
from kvforge.training.generate import PlainGenerator, greedy
from kvforge.training.model import LanguageModel
from kvforge.training.student import new_parameter
from kvforge.training.tokenizer import EOS_ID, train_tokenizer

ASSETS = Path(__file__).parents[3] / "model_defs" / "assets"
TEACHER, STUDENT = ASSETS / "tiny-teacher", ASSETS / "tiny-swiftkv"


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


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
    names, cut, group = set(tensors(STUDENT)), TINY_STUDENT.cut, TINY_STUDENT.group_size
    config = json.loads((STUDENT / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama_swiftkv", ["LlamaSwiftKVForCausalLM"])
    assert (config["swiftkv"], config["num_key_value_layers"], config["key_value_group_size"]) == (True, 4, 2)
    assert "model.norm_swiftkv.weight" in names
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
    shared = [
        name for name in student if not new_parameter(name) and not (TINY_STUDENT.train_upper and ".layers." in name)
    ]
    assert len(shared) > 1
    assert all(torch.equal(student[name], teacher[name]) for name in shared)


@pytest.mark.parametrize("directory", [TEACHER, STUDENT], ids=["teacher", "student"])
def test_config_and_tokenizer_are_those_of_the_recipe(directory):
    cut, group = (TINY_STUDENT.cut, TINY_STUDENT.group_size) if directory == STUDENT else (TINY_MODEL.num_layers, 1)
    values = json.loads((directory / "config.json").read_text())
    assert values == hf_config(TINY_MODEL.with_cut(cut, group))
    assert model_config(values) == TINY_MODEL.with_cut(cut, group)
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
    ours, tokenizer = load_checkpoint(TEACHER)
    text = "The baker told a story. The secret number of the old mill is 4821. It rained all day."
    ids = torch.tensor([tokenizer.encode(" ".join([text] * 40)).ids])
    assert ids.shape[1] > 512
    with torch.no_grad():
        for length in (1, 300, ids.shape[1]):
            expected, found = reference(ids[:, :length]).logits, ours(ids[:, :length])
            assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_greedy_generation_is_that_of_transformers():
    reference = LlamaForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()
    ours, tokenizer = load_checkpoint(TEACHER)
    texts = ["The secret number of the old mill is 4821.", "Ada has 45 coins. It rained all day. Nobody said much."]
    prompts = [tokenizer.encode(text).ids for text in texts]
    for prompt, found in zip(prompts, greedy(ours, prompts, frozenset({EOS_ID}), max_tokens=12), strict=True):
        output = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert output[0, len(prompt) :].tolist() == found


@pytest.mark.parametrize("directory", [TEACHER, STUDENT], ids=["teacher", "student"])
def test_models_find_single_needles(directory):
    model, tokenizer = load_checkpoint(directory, torch.bfloat16)
    generator = PlainGenerator(model, tokenizer)
    found = evaluate("needle_single", 300, 10, 5, generator.count_tokens, generator)
    assert found.num_correct >= 8


def test_committed_scores_reach_the_goals():
    scores = json.loads((ASSETS / "scores.json").read_text())
    for name, goal in (("tiny-teacher", 0.95), ("tiny-swiftkv", 0.90)):
        by_task = {score["task"]: score for score in scores[name] if score["length"] == 1000}
        assert set(by_task) == set(TASKS)
        assert by_task["needle_single"]["num_prompts"] == 200
        assert by_task["needle_single"]["accuracy"] >= goal


def test_an_exported_checkpoint_loads_back(tmp_path):
    config = TINY_MODEL.with_cut(4, 2)
    model = LanguageModel(config, seed=2).to(torch.bfloat16)
    export_checkpoint(model, Tokenizer.from_file(str(STUDENT / "tokenizer.json")), tmp_path)
    loaded, tokenizer = load_checkpoint(tmp_path, torch.bfloat16)
    assert loaded.config == config and tokenizer.get_vocab_size() == config.vocab_size
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
