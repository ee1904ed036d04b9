"""Training sequences: what is supervised, and that the fast encoder agrees with the tokenizer."""

import random

import pytest
import torch

from kvforge.tasks import TASKS
from kvforge.tasks.prompt import make_examples
from kvforge.training.documents import ANSWER_WEIGHT, TASK_NAMES, make_batch, make_document
from kvforge.training.tokenizer import BOS_ID, EOS_ID, FastEncoder, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(vocab_size=1200, seed=0, num_items=300)


@pytest.fixture(scope="module")
def encode(tokenizer):
    return FastEncoder(tokenizer)


@pytest.mark.parametrize("length", [128, 500, 1025, 2049])
def test_documents_have_the_length_and_read_as_the_tokenizer_reads(tokenizer, encode, length):
    for seed in range(20):
        document = make_document(random.Random(seed), length, encode)
        assert len(document.ids) == len(document.weight) == len(document.task) == length
        assert document.ids[0] == BOS_ID and document.ids[-1] == EOS_ID
        end = document.ids.index(EOS_ID)
        assert set(document.ids[end:]) == {EOS_ID} and not any(document.weight[end + 1 :])
        text = tokenizer.decode(document.ids[1:end])
        assert tokenizer.encode(text).ids == document.ids[:end]


def test_fast_encoder_equals_the_tokenizer_on_prompts(tokenizer, encode):
    for task in TASKS:
        for example in make_examples(task, 300, encode.count, 10, seed=0):
            expected = tokenizer.encode(example.prompt, add_special_tokens=False).ids
            assert encode(example.prompt) == expected


def test_digits_are_single_tokens_and_decoding_is_exact(tokenizer):
    text = 'The secret number of the old mill is 90210.\nAnswer: Ada said "rope, jar" — é!'
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(" 90210", add_special_tokens=False).ids]
    assert [piece.strip() for piece in pieces] == list("90210")


def test_tokenizer_training_is_deterministic(tokenizer):
    assert train_tokenizer(vocab_size=1200, seed=0, num_items=300).to_str() == tokenizer.to_str()


def test_supervised_targets_are_the_answers(tokenizer, encode):
    """The positions marked as answers predict exactly the text after a lead, full stop included."""
    batch = make_batch("0", num=16, length=256, encode=encode)
    assert torch.equal(batch.input_ids[:, 1:], batch.targets[:, :-1])
    assert torch.equal(batch.task >= 0, batch.weight == ANSWER_WEIGHT)
    spans = 0
    for ids, targets, task in zip(batch.input_ids, batch.targets, batch.task, strict=True):
        starts = [t for t in range(256) if task[t] >= 0 and (t == 0 or task[t - 1] < 0)]
        for start in starts:
            stop = next(t for t in range(start, 257) if t == 256 or task[t] < 0)
            answer, before = (
                tokenizer.decode(targets[start:stop].tolist()),
                tokenizer.decode(ids[: start + 1].tolist()),
            )
            lead = before.rsplit("\nAnswer: ", 1)[1]
            assert answer.startswith(" ") and answer.endswith(".") and "\n" not in answer + lead
            name = TASK_NAMES[int(task[start])]
            if name != "arithmetic" and name != "variables":
                text = before.split("\n", 1)[0]
                assert f"{lead}{answer}" in text
            spans += 1
    assert spans > 30


def test_batches_depend_on_the_seed_only(encode):
    first, again = make_batch("3/7", 4, 128, encode), make_batch("3/7", 4, 128, encode)
    assert torch.equal(first.input_ids, again.input_ids) and torch.equal(first.weight, again.weight)
    assert not torch.equal(first.input_ids, make_batch("3/8", 4, 128, encode).input_ids)
