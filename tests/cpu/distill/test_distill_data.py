"""Data of every form to samples: the text comes back, the right tokens are targets, errors name the line."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from kvforge.common.errors import KvforgeError
from kvforge.distill import rows
from kvforge.distill.data import load_data
from kvforge.distill.packing import DataSettings
from kvforge.distill.samples import Sample, SampleReader

VOCAB = 300
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "oh"},
    {"role": "user", "content": "on"},
    {"role": "assistant", "content": " yes "},
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Tokenizer files: a token for each byte, `<s>` before a text, and a chat template."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "chat_template": TEMPLATE}
        )
    )
    return folder


def write(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def read(checkpoint: Path, path: Path, mask: str = "all", length: int = 100) -> list[Sample]:
    return list(SampleReader(checkpoint, VOCAB, mask).read(str(path), length))


def text_of(checkpoint: Path, sample: Sample, targets_only: bool = False) -> str:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = sample.ids[sample.weights > 0] if targets_only else sample.ids
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def test_every_form_round_trips(checkpoint: Path, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"text": "naïve 😀 text"},
        {"prompt": "two and", "completion": " two", "meta": {"source": 1}},
        {"messages": CHAT, "prompt": "of the same row, which messages go before"},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "oh"}], "text": None},
        {"input_ids": [5, 6, 7], "weights": [0, 0.5, 1]},
        {"input_ids": [8, 9]},
    )
    found = read(checkpoint, path)
    assert [s.ids.dtype for s in found] == [np.int32] * 6 and {s.weights.dtype for s in found} == {np.dtype("float32")}
    assert [text_of(checkpoint, s) for s in found[:4]] == [
        "<s>naïve 😀 text</s>",
        "<s>two and two</s>",
        "<s><|user|>hi</s>\n<|assistant|>oh</s>\n<|user|>on</s>\n<|assistant|>yes</s>\n",
        "<s><|user|>hi</s>\n<|assistant|>oh</s>\n",
    ]
    assert found[4].ids.tolist() == [5, 6, 7] and found[4].weights.tolist() == [0, 0.5, 1]
    assert found[5].ids.tolist() == [8, 9]
    assert all((s.weights == 1).all() for s in [*found[:4], found[5]])


def test_answers_are_completions_and_turns_of_the_assistant(checkpoint: Path, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "ü and", "completion": " ö"},
        {"messages": CHAT},
        {"text": "no answer"},
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2], "weights": [1, 2]},
        {"messages": CHAT[:1]},
    )
    found = read(checkpoint, path, "answers")
    assert [text_of(checkpoint, s, targets_only=True) for s in found[:4]] == [" ö</s>", "oh</s>yes</s>", "", ""]
    assert found[4].weights.tolist() == [1, 2] and not found[5].weights.any()


def test_the_last_prompt_token_predicts_and_the_end_of_the_answer_does_not(checkpoint: Path, tmp_path: Path) -> None:
    """By hand: `<s>` a b | c d `</s>`: b predicts c, c predicts d, d predicts the end; nothing follows the end."""
    path = write(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "cd"})
    data, report = load_data(path, checkpoint, VOCAB, DataSettings(8, mask="answers"))
    assert data.batch([0]).weight.tolist() == [[0, 0, 1, 1, 1, 0, 0, 0]]
    assert (report.num_targets, report.num_tokens) == (3, 6)
    data, _ = load_data(path, checkpoint, VOCAB, DataSettings(8))
    assert data.batch([0]).weight.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]


def test_end_of_text_is_added_once(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ends = ("</s>", tokenizer.token_to_id("</s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[ends])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}, {"text": "c"})
    found = read(checkpoint, path, "answers")
    assert [text_of(checkpoint, s) for s in found] == ["ab</s>", "c</s>"]
    assert [s.weights.tolist() for s in found] == [[0, 1, 1], [0, 0]]


def test_a_template_that_writes_its_last_turn_otherwise(checkpoint: Path, tmp_path: Path) -> None:
    """As Qwen3's, which puts an empty thought into the last answer alone."""
    thought = "{% if m.role == 'assistant' and loop.last %}(){% endif %}"
    spaced = [*CHAT[:1], {"role": "assistant", "content": " oh\n"}, *CHAT[2:]]
    for content, answers in (
        ("{{ m.content | trim }}", "oh</s>()yes</s>"),
        ("{{ m.content }}", " oh\n</s>() yes </s>"),
    ):
        (checkpoint / "chat_template.jinja").write_text(TEMPLATE.replace("{{ m.content | trim }}", thought + content))
        path = write(tmp_path / "a.jsonl", {"messages": spaced})
        (sample,) = read(checkpoint, path, "answers")
        assert text_of(checkpoint, sample, targets_only=True) == answers
    numbered = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ messages | length }}")
    (checkpoint / "chat_template.jinja").write_text(numbered)
    with pytest.raises(KvforgeError, match=r"line 1: the chat template does not keep the text before message 2"):
        read(checkpoint, path, "answers")


def test_plain_text_is_cut_into_whole_sequences(checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    text = "\ufeff" + "".join(f"line {i}: ö\r\n\n" for i in range(40))
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    found = read(checkpoint, path, length=50)
    assert {s.ids.size for s in found[:-1]} == {50} and 1 < found[-1].ids.size <= 50
    assert b"".join(bytes_of(checkpoint, s) for s in found) == text[1:].encode()
    monkeypatch.setattr("kvforge.distill.samples.BATCH_CHARACTERS", 70)
    again = read(checkpoint, path, length=50)
    assert [s.ids.tolist() for s in again] == [s.ids.tolist() for s in found], "read in several blocks"


def bytes_of(checkpoint: Path, sample: Sample) -> bytes:
    """The bytes of a sample's tokens without its `<s>`; every other token is one byte."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert tokenizer.id_to_token(int(sample.ids[0])) == "<s>"
    byte_of = {c: b for b, c in bytes_to_characters().items()}
    return bytes(byte_of[tokenizer.id_to_token(i)] for i in sample.ids[1:].tolist())


def bytes_to_characters() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level tokenizers (Radford et al., GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def test_rows_of_mixed_forms_keep_their_order(checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    values = []
    for i in range(30):
        values += [{"text": f"t{i}"}, {"messages": [{"role": "user", "content": f"m{i}"}]}, {"input_ids": [i, 65]}]
    path = write(tmp_path / "a.jsonl", *values)
    found = read(checkpoint, path)
    monkeypatch.setattr("kvforge.distill.samples.BATCH_CHARACTERS", 20)
    assert [s.ids.tolist() for s in found] == [s.ids.tolist() for s in read(checkpoint, path)]
    assert [text_of(checkpoint, s) for s in found[:5:3]] == ["<s>t0</s>", "<s>t1</s>"]
    assert found[88].ids.size and "m29" in text_of(checkpoint, found[88]) and found[89].ids.tolist() == [29, 65]


def test_empty_samples_are_counted_and_blank_lines_are_not(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    empty = [{"text": ""}, {"input_ids": []}, {"messages": []}, {"prompt": "a", "completion": ""}]
    path.write_text("\n" + "\n\n".join(json.dumps(v) for v in [*empty, {"text": "ab"}]) + "\n\n")
    _, report = load_data(path, checkpoint, VOCAB, DataSettings(16))
    assert (report.num_samples, report.num_empty, report.num_without_target) == (1, 4, 0)
    assert report.line().endswith("left out because empty: 4")
    write(path, *empty)
    with pytest.raises(KvforgeError, match=r"a\.jsonl has no sample with a token \(4 are empty\)"):
        load_data(path, checkpoint, VOCAB, DataSettings(16))
    write(path, {"text": "ab"})
    with pytest.raises(KvforgeError, match="1 have no target; use --mask all"):
        load_data(path, checkpoint, VOCAB, DataSettings(16, mask="answers"))


BAD_LINES = {
    "not json": ('{"text": "a"', "line 2: not JSON"),
    "nested": ("[" * 100_000, "line 2: not JSON"),
    "list": ('["a"]', "line 2: a list and not an object"),
    "no key": ('{"txt": "a", "prompt": "b"}', r"line 2: none of the known keys \(it has 'txt', 'prompt'\)"),
    "nothing": ("{}", r"line 2: none of the known keys \(it has none\)"),
    "number": ('{"text": 5}', "line 2: text is of type int; give a string"),
    "surrogate": ('{"text": "a\\ud800"}', "line 2: character 2 is half a surrogate pair"),
    "id too large": ('{"input_ids": [1, 300]}', "line 2: token 300 is outside the model's vocabulary of 300"),
    "id below 0": ('{"input_ids": [-1]}', "line 2: token -1 is outside"),
    "huge id": ('{"input_ids": [99999999999999999999]}', "line 2: input_ids is not a list of integers"),
    "float ids": ('{"input_ids": [1.0]}', "line 2: input_ids is not a list of integers"),
    "bool ids": ('{"input_ids": [true]}', "line 2: input_ids is not a list of integers"),
    "ids of ids": ('{"input_ids": [[1], [2, 3]]}', "line 2: input_ids is not a list of integers"),
    "weights short": ('{"input_ids": [1, 2], "weights": [1]}', "line 2: 1 weights for 2 input_ids"),
    "weight negative": ('{"input_ids": [1, 2], "weights": [1, -1]}', "line 2: a weight is negative or not finite"),
    "weight nan": ('{"input_ids": [1, 2], "weights": [1, NaN]}', "line 2: a weight is negative or not finite"),
    "weight huge": ('{"input_ids": [1, 2], "weights": [1, 1e300]}', "line 2: a weight is negative or not finite"),
    "weight text": ('{"input_ids": [1, 2], "weights": ["a", "b"]}', "line 2: weights is not a list of numbers"),
    "messages text": ('{"messages": "hi"}', "line 2: messages is not a list"),
    "message": ('{"messages": [{"role": "user"}]}', "line 2: message 1 has no role and content"),
    "sharegpt": ('{"conversations": [{"from": "tool", "value": ""}]}', "line 2: message 1 is from 'tool'"),
}


@pytest.mark.parametrize("name", BAD_LINES)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_bad_lines_are_one_sentence(checkpoint: Path, tmp_path: Path, name: str) -> None:
    line, message = BAD_LINES[name]
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(KvforgeError, match=message) as caught:
        load_data(path, checkpoint, VOCAB, DataSettings(16))
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".") and len(str(caught.value)) < 400


def test_bad_files_are_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    def message(source: object, **settings: object) -> str:
        with pytest.raises(KvforgeError) as caught:
            load_data(str(source), checkpoint, VOCAB, DataSettings(**({"length": 16} | settings)))
        return str(caught.value)

    (tmp_path / "latin.jsonl").write_bytes('{"text": "a"}\n{"text": "ü"}\n'.encode("latin-1"))
    assert "latin.jsonl, line 2: byte 11 is not UTF-8" in message(tmp_path / "latin.jsonl")
    (tmp_path / "latin.txt").write_bytes(b"a\nb\n\xff")
    assert "latin.txt, line 3: byte 1 is not UTF-8" in message(tmp_path / "latin.txt")
    assert "cannot be read (No such file or directory)" in message(tmp_path / "none.jsonl")
    assert "cannot be read (No such file or directory)" in message("none.txt")
    assert "does not exist" in message(tmp_path / "none")
    (tmp_path / "a.csv").write_text("a")
    assert "neither .jsonl nor .txt" in message(tmp_path / "a.csv")
    (tmp_path / "empty.txt").write_text("")
    assert "has no sample with a token" in message(tmp_path / "empty.txt")
    assert "nothing is an answer; use --mask all" in message(tmp_path / "empty.txt", mask="answers")
    assert "--length 1 is too short" in message(tmp_path / "empty.txt", length=1)
    path = write(tmp_path / "chat.jsonl", {"messages": CHAT})
    (checkpoint / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    assert "line 1: the chat template refuses this conversation (roles must alternate)" in message(path)
    for expression in ("1 / 0", "messages + 1", "messages[0].content.none()"):
        (checkpoint / "chat_template.jinja").write_text("{{ " + expression + " }}")
        assert "line 1: the chat template refuses this conversation (" in message(path)
    (checkpoint / "chat_template.jinja").write_text("{% if %}")
    assert "The chat template is not valid" in message(path)
    (checkpoint / "chat_template.jinja").unlink()
    (checkpoint / "tokenizer_config.json").unlink()
    assert "line 1: messages need a chat template" in message(path)
    (checkpoint / "tokenizer.json").write_text("{")
    assert "is not a readable tokenizer" in message(path)
    (checkpoint / "tokenizer.json").unlink()
    assert "has no tokenizer.json, which text needs" in message(write(path, {"text": "a"}))
    assert load_data(write(path, {"input_ids": [1, 2]}), checkpoint, VOCAB, DataSettings(4))[1].num_tokens == 2


def test_a_tokenizer_larger_than_the_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "a"}, {"text": "ab"})
    with pytest.raises(KvforgeError, match=r"line 1: token \d+ is outside the model's vocabulary of 66"):
        load_data(path, checkpoint, 66, DataSettings(16))


def test_hugging_face_datasets(checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    values = [{"prompt": f"p{i}", "completion": f"c{i}", "text": None} for i in range(5)]
    path = write(tmp_path / "a.jsonl", *values)
    expected = [s.ids.tolist() for s in read(checkpoint, path)]
    saved = datasets.Dataset.from_list(values)
    saved.save_to_disk(str(tmp_path / "one"))
    assert [s.ids.tolist() for s in read(checkpoint, tmp_path / "one")] == expected
    splits = datasets.DatasetDict({"train": saved.select([0]), "sft": saved})
    splits.save_to_disk(str(tmp_path / "several"))
    assert [s.ids.tolist() for s in read(checkpoint, f"{tmp_path}/several:sft")] == expected
    assert [s.ids.tolist() for s in read(checkpoint, tmp_path / "several")] == expected[:1]
    with pytest.raises(KvforgeError, match=r"no split 'none', it has train, sft.*give a \.jsonl"):
        read(checkpoint, f"{tmp_path}/several:none")
    with pytest.raises(KvforgeError, match="row 0: none of the known keys"):
        datasets.Dataset.from_list([{"a": 1}]).save_to_disk(str(tmp_path / "other"))
        read(checkpoint, tmp_path / "other")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(KvforgeError, match=r"needs the package datasets .*: pip install -e '\.\[train\]'"):
        list(rows.read_dataset("some/name"))


def test_templates_render_as_transformers_renders_them(checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from kvforge.tokenization.chat_template import ChatTemplate

    source = (
        "{%- for m in messages %}\n    {%- if loop.index > 3 %}{% break %}{% endif %}\n"
        "    {{ '<|' + m['role'] + '|>' + m | tojson + eos_token }}\n    {%- if m.role == 'assistant' %}\n"
        "{% generation %}{{ m.content | trim }} é{% endgeneration %}\n    {%- endif %}\n{% endfor %}\n"
        "{% if add_generation_prompt %}<|assistant|>{{ tools is none }}{% endif %}"
    )
    (checkpoint / "chat_template.jinja").write_text(source)
    template = ChatTemplate.from_dir(checkpoint)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    for prompt in (False, True):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
        assert template is not None and template.render(CHAT, add_generation_prompt=prompt) == expected
