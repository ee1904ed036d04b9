"""What a build says of tokens that the files of a checkpoint disagree about."""

import json
import warnings
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvforge.checkpoint import open_checkpoint
from kvforge.common.errors import CheckpointError, CheckpointWarning
from kvforge.common.sampling_fields import DEFAULT_FIELDS
from kvforge.compiler.checkpoint_texts import check_texts
from kvforge.runtime.requests.defaults import SamplingDefaults
from kvforge.tokenization.files import read_tokenizer
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.file_mutations import edit_json


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "c", num_hidden_layers=1)


def said(path: Path, vocab_size: int = 320) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_texts(open_checkpoint(path), vocab_size)
    return [str(each.message) for each in caught if each.category is CheckpointWarning]


def test_files_that_agree_say_nothing(checkpoint: Path) -> None:
    edit_json(checkpoint / "tokenizer_config.json", "added_tokens_decoder", {"1": {"content": "<s>", "special": True}})
    assert said(checkpoint) == []


def test_a_token_that_the_tokenizer_has_not(checkpoint: Path) -> None:
    edit_json(checkpoint / "tokenizer_config.json", "pad_token", "[PAD]")
    assert ["names the token '[PAD]', but tokenizer.json has no such token" in each for each in said(checkpoint)] == [
        True
    ]


def test_a_token_in_another_place(checkpoint: Path) -> None:
    edit_json(checkpoint / "tokenizer_config.json", "added_tokens_decoder", {"7": {"content": "<s>", "special": True}})
    assert "names the token '<s>' as 7, but tokenizer.json has it as 1; tokenizer.json is used" in said(checkpoint)[0]


def test_tokens_without_an_embedding(checkpoint: Path) -> None:
    assert "has token 319, but the model has 300 embeddings" in said(checkpoint, 300)[0]


@pytest.mark.parametrize("value", [5, ["<s>"], "\ud800"])
def test_what_is_no_token_is_refused(checkpoint: Path, value: object) -> None:
    edit_json(checkpoint / "tokenizer_config.json", "eos_token", value)
    with pytest.raises(CheckpointError, match=r"eos_token is .*; it must be a token"):
        said(checkpoint)


def test_cutting_that_a_tokenizer_brings_is_not_applied(checkpoint: Path) -> None:
    file = checkpoint / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(4)
    tokenizer.save(str(file))
    assert json.loads(file.read_text())["truncation"] is not None
    assert len(read_tokenizer(file).encode("a text of many bytes").ids) > 10


@pytest.mark.parametrize(("name", "value"), [("temperature", "0.6"), ("top_k", 50.0), ("top_p", 0), ("min_p", True)])
def test_sampling_that_could_not_be_served_refuses_the_build(checkpoint: Path, name: str, value: object) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(CheckpointError, match=rf"generation_config.json of .* cannot be used: {name} is .*; give a"):
        said(checkpoint)


def test_what_a_build_takes_of_sampling_is_served(checkpoint: Path) -> None:
    own = {"temperature": 0.0, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": None, "do_sample": False}
    (checkpoint / "generation_config.json").write_text(json.dumps(own))
    assert said(checkpoint) == []
    assert SamplingDefaults.read(checkpoint).values["temperature"] == 0.0
    assert own.keys() - {"do_sample"} == set(DEFAULT_FIELDS)
