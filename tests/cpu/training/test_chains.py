"""Documents of chains: every question's answer follows from the text, and any name may be asked for."""

import random
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from perf.training.config import EOS_ID, Stage, TeacherConfig
from perf.training.documents import TASK_NAMES, make_batch, make_document
from perf.training.teacher import train_teacher
from perf.training.tiny import TINY_MODEL
from perf.training.tokenizer import FastEncoder

TEACHER = Path(__file__).parents[3] / "model_defs" / "assets" / "tiny-teacher"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TEACHER / "tokenizer.json"))


@pytest.fixture(scope="module")
def encode(tokenizer: Tokenizer) -> FastEncoder:
    return FastEncoder(tokenizer)


def follow(text: str, name: str) -> tuple[int, str]:
    """How many links before a name the amount stands, and the amount."""
    links = 0
    while same := re.search(rf"\b{name} has the same as (\w+)\.", text):
        name, links = same[1], links + 1
    return links, re.search(rf"\b{name} has (\d+) coins\.", text)[1]


@pytest.mark.parametrize("hops", [1, 3, 8])
@pytest.mark.parametrize("length", [96, 257, 513])
def test_answers_follow_from_the_text(tokenizer: Tokenizer, encode: FastEncoder, length: int, hops: int) -> None:
    asked = set()
    for seed in range(20):
        stage = Stage(length, 1, 1, min_density=0.3, chain_hops=hops)
        document = make_document(random.Random(seed), length, encode, stage)
        assert len(document.ids) == length
        text, *answers = tokenizer.decode(document.ids[1 : document.ids.index(EOS_ID)]).split("\nAnswer: ")
        labels = [
            task for before, task in zip([-1, *document.task], document.task, strict=False) if task > before == -1
        ]
        assert answers and len(labels) == len(answers)
        text = text.split("\nQuestion")[0]
        for answer, label in zip(answers, labels, strict=True):
            name, amount = re.match(r"(\w+) has (\d+) coins\.", answer).groups()
            links, expected = follow(text, name)
            assert amount == expected and TASK_NAMES[label] == f"chain_{links}"
            asked.add(links)
    assert len(asked) > 1 and (asked == set(range(hops + 1)) or length == 96), "names in the middle are asked for too"


def test_chains_without_a_task_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 8"):
        Stage(512, 1, 1, chain_hops=9)


def test_a_chain_refers_to_names_before_it(encode: FastEncoder, tokenizer: Tokenizer) -> None:
    stage = Stage(512, 8, 1, min_density=0.9, chain_hops=8)
    for ids in make_batch("order", stage, encode).input_ids.tolist():
        text = tokenizer.decode(ids).split("\n")[0]
        for link in re.finditer(r"has the same as (\w+)\.", text):
            assert re.search(rf"\b{link[1]} has ", text[: link.start()])


def test_training_begins_with_the_checkpoint_that_is_named(tmp_path: Path, encode: FastEncoder) -> None:
    config = TeacherConfig(TINY_MODEL, (Stage(32, 1, 1, chain_hops=1),), lr=0.0)
    trained, _ = train_teacher(config, tmp_path / "run", encode, start=TEACHER)
    from safetensors.torch import load_file

    for name, tensor in load_file(TEACHER / "model.safetensors").items():
        assert torch.equal(trained.state_dict()[name], tensor.float()), name
