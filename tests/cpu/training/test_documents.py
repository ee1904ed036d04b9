"""Training sequences: what is supervised, and that the fast encoder agrees with the tokenizer."""

import random

import pytest
import torch

from kvforge.tasks import TASKS
from kvforge.tasks.prompt import make_examples
from perf.training.config import BOS_ID, EOS_ID, Stage
from perf.training.documents import (
    ANSWER_WEIGHT,
    TASK_NAMES,
    make_batch,
    make_document,
    make_pairs,
)
from perf.training.tokenizer import FastEncoder, train_tokenizer

TOLD = {"needle_single", "quoting", "list_recall", "amounts", "qa_single"}
"""Tasks whose answer stands in the text as it is asked for."""
SMALL = Stage(length=128, sequences=4, max_steps=1)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(vocab_size=1200, seed=0, num_items=300)


@pytest.fixture(scope="module")
def encode(tokenizer):
    return FastEncoder(tokenizer)


@pytest.mark.parametrize("length", [128, 500, 1025, 2049])
def test_documents_have_the_length_and_read_as_the_tokenizer_reads(tokenizer, encode, length):
    for seed in range(20):
        document = make_document(random.Random(seed), length, encode, Stage(length, 1, 1))
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
    batch = make_batch("0", Stage(256, 16, 1), encode)
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
            if name in TOLD:
                text = before.split("\n", 1)[0]
                assert f"{lead}{answer}" in text
            spans += 1
    assert spans > 30


def test_batches_depend_on_the_seed_only(encode):
    first, again = make_batch("3/7", SMALL, encode), make_batch("3/7", SMALL, encode)
    assert torch.equal(first.input_ids, again.input_ids) and torch.equal(first.weight, again.weight)
    assert not torch.equal(first.input_ids, make_batch("3/8", SMALL, encode).input_ids)


def test_first_weight_marks_the_first_word_or_digit_of_every_answer(tokenizer, encode):
    stage = Stage(256, 16, 1, first_weight=5.0, min_density=0.5)
    batch = make_batch("0", stage, encode)
    assert torch.equal(batch.task >= 0, batch.weight >= ANSWER_WEIGHT)
    for targets, task, weight in zip(batch.targets, batch.task, batch.weight, strict=True):
        for t in range(1, 256):
            if task[t] >= 0 and task[t - 1] < 0:
                quoted = TASK_NAMES[int(task[t])] == "quoting"
                assert (tokenizer.decode([int(targets[t])]) == ' "') == quoted
                heavy = 2 if quoted else 1
                assert weight[t : t + heavy + 1].tolist() == [5.0] * heavy + [1.0]


def test_a_document_has_one_list_of_common_words_at_most(tokenizer, encode):
    """Its question does not say which list."""
    stage = Stage(1024, 1, 1, min_density=1.0, num_misfits=6, mix=(("common_words", 0.7), ("amounts", 0.3)))
    documents = [make_document(random.Random(seed), 1024, encode, stage).ids for seed in range(12)]
    questions = {tokenizer.decode(ids).count("The most frequent words are") for ids in documents}
    assert questions == {1}


def test_a_document_ends_where_names_run_out(encode):
    stage = Stage(2048, 1, 1, min_density=1.0, mix=(("needle_queries", 1.0),))
    document = make_document(random.Random(0), 2048, encode, stage)
    assert len(document.ids) == 2048 and sum(task >= 0 for task in document.task) > 200


def test_pairs_ask_only_for_what_was_told(tokenizer, encode):
    for seed in range(20):
        document = make_pairs(random.Random(seed), 129, encode)
        assert len(document.ids) == 129 and set(document.task) == {-1}
        told, asked = tokenizer.decode(document.ids[1:]).replace("</s>", "").split("\n")
        words = told.split()
        values = dict(zip(words[::2], words[1::2], strict=True))
        words = asked.split()
        assert all(values[k] == v for k, v in zip(words[::2], words[1::2], strict=True))
        assert sum(document.weight) == len(words) / 2 > 20
