"""kvforge generate and kvforge bench on a compiled engine."""

import ast
import io
import json
import re
import sys
from pathlib import Path

import pytest

from kvforge import LLM, SamplingParams
from kvforge.cli import main
from tests.support.models.engines import SWIFTKV
from tests.support.models.shelf import EngineShelf
from tests.support.models.text_tokenizers import byte_level
from tests.support.sessions.fake import FakeSession

PROMPTS = ["The old mill", "Grüße, 😀"]


@pytest.fixture(scope="module")
def engine(engines: EngineShelf) -> str:
    return str(engines.engine(SWIFTKV))


@pytest.fixture(scope="module")
def expected(engine: str) -> list:
    return LLM(engine, kv_cache_gib=0.1).generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12))


def test_generate_prints_the_text_of_one_prompt(engine, expected, capsys) -> None:
    assert main(["generate", engine, "--prompt", PROMPTS[0], "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == expected[0].outputs[0].text + "\n"


def test_generate_keeps_the_order_of_several_prompts(engine, expected, capsys) -> None:
    arguments = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    assert main(["generate", engine, *arguments, "--max-tokens", "12", "--n", "2"]) == 0
    texts = [result.outputs[0].text for result in expected]
    assert capsys.readouterr().out == "".join(
        f"[{i}/2.{j}] {text}\n" for i, text in enumerate(texts, 1) for j in (1, 2)
    )


def test_generate_reads_standard_input_and_prints_json(engine, expected, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPTS[1] + "\n"))
    assert main(["generate", engine, "--json", "--max-tokens", "12", "--logprobs", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt"] == PROMPTS[1] and result["finished"] is True
    completion = result["outputs"][0]
    assert completion["token_ids"] == expected[1].outputs[0].token_ids
    assert completion["text"] == expected[1].outputs[0].text and completion["finish_reason"] == "length"
    assert len(completion["logprobs"]) == 12 and completion["cumulative_logprob"] < 0


def test_generate_shows_log_probabilities_of_its_tokens(engine, expected, capsys) -> None:
    arguments = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    assert main(["generate", engine, *arguments, "--max-tokens", "12", "--json", "--logprobs", "2"]) == 0
    wanted = [json.loads(line)["outputs"][0]["logprobs"] for line in capsys.readouterr().out.splitlines()]
    assert main(["generate", engine, *arguments, "--max-tokens", "12", "--logprobs", "2"]) == 0
    texts, *tables = capsys.readouterr().out.removesuffix("\n").split("\n\n")
    assert texts.splitlines() == [f"[{i}/2] {one.outputs[0].text}" for i, one in enumerate(expected, 1)]
    for i, (table, tokens) in enumerate(zip(tables, wanted, strict=True), 1):
        label, *lines = table.splitlines()
        assert label == f"[{i}/2]" and len(lines) == 12
        for line, token in zip(lines, tokens, strict=True):
            numbers = [f"{one:.4f}" for one in (token["logprob"], *token["top"].values())]
            assert re.findall(r"-?[0-9]+\.[0-9]{4}(?= |$)", line) == numbers and f"rank {token['rank']} " in line
        shown = "".join(ast.literal_eval(line.split("  ")[0]) for line in lines)
        assert i == 2 or shown == expected[0].outputs[0].text


def test_generate_at_a_terminal_says_that_it_reads(engine, expected, capsys, monkeypatch) -> None:
    terminal = io.StringIO(PROMPTS[0])
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["generate", engine, "--max-tokens", "12"]) == 0
    said = capsys.readouterr()
    assert said.out == expected[0].outputs[0].text + "\n"
    assert "reading the prompt from standard input; Ctrl-D" in said.err


def test_generate_writes_the_asked_form(engine, tmp_path: Path, capsys) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "schema.json").write_text('{"enum": ["yes", "no"]}')
    (tmp_path / "words.gbnf").write_text('root ::= "yes" | "no"')
    guides = (
        ["--regex", "yes|no"],
        ["--grammar", f"{tmp_path}/words.gbnf"],
        ["--json-schema", f"{tmp_path}/schema.json"],
    )
    for guide in guides:
        assert main(["generate", engine, "--prompt", "a", *guide]) == 0
        assert capsys.readouterr().out.strip().strip('"') in ("yes", "no")


def test_generate_samples_the_same_for_a_seed(engine, capsys) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        arguments = ["--temperature", "1.5", "--top-p", "0.9", "--top-k", "40", "--seed", seed, "--max-tokens", "20"]
        assert main(["generate", engine, "--prompt", "a", *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x" * 600], "the prompt has 600 tokens, but the engine takes at most 511"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens is 0; give a whole number of at least 1"),
        (["--prompt", "a", "--top-p", "nan"], "top_p is nan"),
        (["--prompt", "a", "--stop", ""], "stop holds ''"),
        (["--prompt", "half \udcc3"], "the text is not Unicode at character 5"),
        (["--prompt", "a", "--bad-word", "\udcc3"], "the text is not Unicode"),
        (["--prompt", "a", "--kv-cache-gib", "inf"], "kv_cache_gib is inf"),
        (["--prompt", "a", "--kv-cache-gib", "nan"], "kv_cache_gib is nan"),
        (["--prompt", "a", "--kv-cache-gib", "-1"], "kv_cache_gib is -1.0"),
        (["--prompt", "a", "--kv-cache-gib", "1e-6"], "raise --kv-cache-gib or lower --max-seq-len"),
        (["--prompt", "a", "--max-seq-len", "513"], "max_seq_len is 513"),
        (["--prompt", "long", "--max-seq-len", "4"], "the prompt has 4 tokens, but the engine takes at most 3"),
        (["--prompt", "a", "--presence-penalty", "1e300"], "presence_penalty is 1e+300"),
        (["--prompt", "a", "--regex", "("], "guided_decoding cannot be used"),
        (["--prompt", "a", "--json-schema", "missing.json"], "missing.json cannot be read"),
    ],
)
def test_generate_errors_are_one_sentence(engine, arguments, says, capsys) -> None:
    assert main(["generate", engine, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("kvforge: error: ") and says in captured.err
    assert captured.err.count("\n") == 1 and captured.err.endswith(".\n")


def test_generate_with_a_short_sequence_limit(engine, expected, capsys) -> None:
    assert main(["generate", engine, "--prompt", PROMPTS[0], "--max-seq-len", "16", "--kv-cache-gib", "0.001"]) == 0
    text = capsys.readouterr().out.rstrip("\n")
    assert text and expected[0].outputs[0].text.startswith(text)


@pytest.mark.parametrize("encoding_errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_not_text(engine, encoding_errors, capsys, monkeypatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xff"), encoding="utf-8", errors=encoding_errors)
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["generate", engine]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("kvforge: error: ") and captured.err.count("\n") == 1
    assert "UTF-8" in captured.err


class NoLogits(FakeSession):
    """The second prompt's logits are not numbers from the start."""

    def upper(self, step, pools):
        logits = super().upper(step, pools)
        logits[1:] = float("nan")
        return logits


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_generate_exits_with_1_if_a_sequence_failed(arguments, capsys, monkeypatch) -> None:
    tokenizer = byte_level()
    session = NoLogits(vocab_size=tokenizer.backend.get_vocab_size())
    monkeypatch.setattr("kvforge.runtime.llm.LLM", lambda *_, **__: LLM(session=session, tokenizer=tokenizer))
    monkeypatch.setattr("kvforge.commands.generate.engine_of", lambda args, predicts: (args.engine, None))
    command = ["generate", "engine", "--prompt", "The fox", "--prompt", "dog", "--max-tokens", "4", "--ignore-eos"]
    assert main([*command, *arguments]) == 1
    captured = capsys.readouterr()
    message = "kvforge: error: 1 of 2 sequences failed: the model's logits are not finite.\n"
    assert captured.err.endswith(message)
    if arguments:
        results = [json.loads(line)["outputs"][0] for line in captured.out.splitlines()]
        assert [result["finish_reason"] for result in results] == ["length", "error"]
        assert [len(result["token_ids"]) for result in results] == [4, 0]
    else:
        assert captured.out.startswith("[1/2] ") and captured.out.endswith("[2/2] \n")


def test_no_engine_is_one_sentence(tmp_path: Path, capsys) -> None:
    workloads = write(tmp_path, {"w": {"requests": 1, "input_tokens": 5, "output_tokens": 1}})
    for arguments in (["generate", str(tmp_path), "--prompt", "a"], ["bench", str(tmp_path), "--workloads", workloads]):
        assert main(arguments) == 1
        assert "is not an engine directory" in capsys.readouterr().err


def write(folder: Path, workloads: object) -> str:
    path = folder / "workloads.json"
    path.write_text(workloads if isinstance(workloads, str) else json.dumps(workloads))
    return str(path)


WORKLOADS = {
    "batch": {"requests": 3, "input_tokens": 40, "output_tokens": 5},
    "single": {"requests": 1, "input_tokens": 7, "output_tokens": 1},
}


def test_bench_prints_the_peers_json_lines(engine, tmp_path: Path, capsys) -> None:
    assert main(["bench", engine, "--workloads", write(tmp_path, WORKLOADS), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = ["peer", "workload", "ttft_s", "total_s", "prompt_tok_s", "combined_tok_s"]
    assert [list(line) for line in lines] == [[*names, "decode_tok_s", "token_ms"], names]  # the second has one token
    for line, (name, workload) in zip(lines, WORKLOADS.items(), strict=True):
        tokens = workload["requests"] * (workload["input_tokens"] + workload["output_tokens"])
        assert (line["peer"], line["workload"]) == ("kvforge", name)
        assert 0 < line["ttft_s"] <= line["total_s"]
        assert line["combined_tok_s"] == pytest.approx(tokens / line["total_s"])
        prompted = workload["requests"] * workload["input_tokens"] / line["prompt_tok_s"]
        rounded = 4 * sys.float_info.epsilon  # of a rate and of a time made of it
        assert line["ttft_s"] * (1 - rounded) <= prompted <= line["total_s"] * (1 + rounded)
        if workload["output_tokens"] > 1:
            assert line["decode_tok_s"] > 0 and 0 < line["token_ms"] <= 1e3 * line["total_s"]


def test_bench_reports_the_median_of_several_runs_as_a_table(engine, tmp_path: Path, capsys) -> None:
    path = write(tmp_path, WORKLOADS)
    assert main(["bench", engine, "--workloads", path, "--only", "single", "--num-runs", "3", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert sorted(line["runs_total_s"])[1] == line["total_s"] and len(line["runs_total_s"]) == 3
    assert main(["bench", engine, "--workloads", path]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["workload", "batch", "single"]
    assert rows[1].split()[1:4] == ["3", "40", "5"]


def test_bench_needs_no_file(engine, capsys) -> None:
    sizes = ["--input-len", "24", "--output-len", "3", "--concurrency", "2"]
    assert main(["bench", engine, *sizes, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["workload"] == "2x24+3" and line["combined_tok_s"] == pytest.approx(2 * 27 / line["total_s"])
    assert main(["bench", engine, "--input-len", "9"]) == 0  # the rest as --help says
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["1x9+64", "1", "9", "64"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--input-len", "0"], "--input-len is 0; give at least 1."),
        (["--workloads", "FILE", "--concurrency", "2"], "--concurrency describes a workload, and --workloads has its"),
        (["--only", "chat"], "--only chooses from a file; add --workloads FILE, or leave it out."),
        (["--input-len", "500"], "needs sequences of 564 tokens, but the engine takes 512"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(engine, arguments, says, capsys) -> None:
    assert main(["bench", engine, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and says in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "workloads, arguments, says",
    [
        (
            {"long": {"requests": 1, "input_tokens": 500, "output_tokens": 20}},
            [],
            "workload 'long' needs sequences of 520 tokens, but the engine takes 512",
        ),
        ({"w": {"requests": 1, "input_tokens": 5}}, [], "workload 'w'"),
        ({"w": {"requests": 0, "input_tokens": 5, "output_tokens": 1}}, [], "workload 'w'"),
        ([], [], "holds no workloads"),
        ("{", [], "cannot be read as workloads"),
        (WORKLOADS, ["--only", "chat"], "has no workload 'chat'; it has batch, single"),
        (WORKLOADS, ["--max-num-tokens", "99999"], "max_num_tokens is 99999"),
        (WORKLOADS, ["--num-runs", "0"], "--num-runs is 0"),
        (WORKLOADS, ["--kv-cache-gib", "inf"], "kv_cache_gib is inf"),
        (WORKLOADS, ["--max-seq-len", "44"], "takes 44"),
    ],
)
def test_bench_errors_are_one_sentence(engine, workloads, arguments, says, tmp_path: Path, capsys) -> None:
    assert main(["bench", engine, "--workloads", write(tmp_path, workloads), *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and says in captured.err and captured.err.count("\n") == 1
    assert captured.err.endswith(".\n")
