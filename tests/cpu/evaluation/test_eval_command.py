"""``kvforge eval`` with small engines: the report's numbers, the tables, and what it refuses."""

import json
import math
import random
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from kvforge.cli import main
from kvforge.common.errors import KvforgeError
from kvforge.evaluation.documents import generated_documents, text_documents
from kvforge.evaluation.early_exit import alignment
from kvforge.evaluation.engine import EngineGenerator
from kvforge.evaluation.paired import paired_difference
from kvforge.evaluation.run import EvalOptions, make_prompts
from kvforge.runtime import LLM
from kvforge.runtime.scoring.score import score
from kvforge.runtime.text.tokenizer import Tokenizer
from tests.support.models.engines import EARLY_EXIT, PLAIN, SWIFTKV
from tests.support.models.shelf import EngineShelf
from tests.support.rounding import config_of, logprob_error, model_error

ASSETS = Path(__file__).parents[3] / "model_defs" / "assets"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng = random.Random(0)
    path = tmp_path / "text.txt"
    path.write_text(" ".join("".join(rng.choices("abcdef", k=5)) for _ in range(200)))
    return path


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["eval", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_perplexity_of_a_text_is_that_of_its_scores(
    engines: EngineShelf, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engines.engine(SWIFTKV)
    options = ("--task", "none", "--perplexity", text, "--length", "100", "--num-documents", "5", "--json")
    report = json.loads(evaluate(capsys, engine, *options))
    assert report["scores"] == [] and "teacher" not in report and "early_exit" not in report
    found = report["documents"]
    tokenizer = Tokenizer.from_dir(engine / "tokenizer")
    assert tokenizer is not None
    pieces = text_documents(text, tokenizer, 5, 100)
    scores = score(LLM(engine), [(piece[:1], piece[1:]) for piece in pieces])
    mean = sum(float(tokens.logprobs.sum()) for tokens in scores) / 495
    assert (found["num_documents"], found["num_tokens"]) == (5, 495)
    # The two runs may chunk the documents differently. A perplexity moves as its exponent, a mean of log-probabilities.
    largest, config = max(float(-tokens.logprobs.min()) for tokens in scores), config_of(engines.checkpoint(SWIFTKV))
    rounding = logprob_error(config.vocab_size, largest, model_error(config, 100))
    assert found["perplexity"]["value"] == pytest.approx(math.exp(-mean), rel=math.expm1(rounding))
    assert found["perplexity"]["low"] < found["perplexity"]["value"] < found["perplexity"]["high"]


def test_a_teacher_is_compared_on_the_same_prompts_and_documents(
    engines: EngineShelf, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    verdicts = iter([True, False, True, False] + [True] * 4 + [False, True, True, True] + [True, False] * 2)
    seen = []

    def is_correct(example, answer):
        seen.append(example)
        return next(verdicts)

    monkeypatch.setattr("kvforge.evaluation.run.is_correct", is_correct)
    student, teacher = engines.engine(SWIFTKV), engines.engine(PLAIN)
    options = ["--task", "arithmetic", "--task", "needle_single", "--num-prompts", "4", "--length", "300"]
    options += ["--teacher", teacher, "--num-documents", "3", "--plot", tmp_path / "plot.svg", "--json"]
    report = json.loads(evaluate(capsys, student, *options))
    assert seen[:8] == seen[8:], "the teacher had other prompts"
    rows = {row["task"]: row for row in report["scores"]}
    assert rows["arithmetic"]["num_correct"] == 2 and rows["arithmetic"]["teacher"]["num_correct"] == 3
    expected = paired_difference([False, True, True, True], [True, False, True, False])
    assert rows["arithmetic"]["versus_teacher"] == vars(expected)
    assert rows["needle_single"]["versus_teacher"]["gained"] == 2
    found = report["documents"]
    assert (found["source"], found["num_documents"]) == ("generated", 3)
    assert found["kl"]["value"] > 0.1 and found["agreement"]["value"] < 0.9, "two random models are alike"
    assert found["teacher_perplexity"] != found["perplexity"]
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_tables_show_every_part(engines: EngineShelf, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engines.engine(PLAIN)
    options = ("--task", "arithmetic", "--num-prompts", "2", "--length", "300", "--num-documents", "2")
    out = evaluate(capsys, engine, *options, "--teacher", engine)
    table, paired, documents = out.strip().split("\n\n")
    assert table.splitlines()[1].startswith("arithmetic") and "+0.0" in paired
    assert "2 documents (generated)" in documents
    assert "0.00000   0.00000 to 0.00000" in documents and "100.00   100.00 to 100.00" in documents


def test_early_exit_has_its_table_and_figure(
    engines: EngineShelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    options = ("--task", "none", "--early-exit", "--length", "250", "--num-documents", "2")
    out = evaluate(capsys, engines.engine(EARLY_EXIT), *options, "--plot", tmp_path / "plot.svg")
    assert "2 documents (generated)" in out and "alignment" in out
    assert [path.name for path in tmp_path.iterdir()] == ["plot-early-exit.svg"]
    report = json.loads(evaluate(capsys, engines.engine(EARLY_EXIT), *options, "--json"))
    assert report["early_exit"]["all"]["num_tokens"] == report["documents"]["num_tokens"]
    assert report["early_exit_on"] == "documents"


def test_early_exit_on_the_engines_own_answers(engines: EngineShelf, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engines.engine(EARLY_EXIT)
    options = ["--task", "arithmetic", "--task", "amounts", "--num-prompts", "3", "--length", "400"]
    report = json.loads(evaluate(capsys, engine, *options, "--early-exit", "answers", "--json"))
    assert "documents" not in report and report["early_exit_on"] == "answers"
    generator = EngineGenerator(engine, 400, show_progress=False)
    prompts = make_prompts(engine, EvalOptions(("arithmetic", "amounts"), 3, 400))
    answers = generator.answer([example.prompt for examples in prompts.values() for example in examples])
    expected = alignment(generator.llm, [(answer.prompt, answer.token_ids) for answer in answers])
    assert report["early_exit"] == json.loads(json.dumps(asdict(expected)))
    assert report["early_exit"]["all"]["num_tokens"] == sum(len(answer.token_ids) for answer in answers) > 6
    out = evaluate(capsys, engine, *options, "--early-exit", "answers")
    assert "early exit, on answers\nconfidence" in out


def test_what_cannot_be_measured_is_refused_before_anything_is(
    engines: EngineShelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvforge.evaluation.run.LLM", lambda *_, **__: 1 / 0)
    monkeypatch.setattr("kvforge.evaluation.engine.LLM", lambda *_, **__: 1 / 0)
    for options, message in (
        (("--early-exit", "--length", "300"), "this engine has no early exit; build it"),
        (("--perplexity", "generated", "--length", "300"), "length 299 is too short for task needle_multi: it needs "),
        (
            ("--task", "quoting", "--length", "460"),
            "answers of quoting take .* tokens of this tokenizer and 48 ",
        ),
        (("--teacher", "absent"), "absent is not an engine directory"),
    ):
        assert main(["eval", str(engines.engine(PLAIN)), *options]) == 1
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "chess"), "unknown task 'chess'"),
        (("--task", "none"), "leaves nothing to measure"),
        (("--task", "none", "--early-exit", "answers"), "--early-exit answers needs tasks"),
        (
            ("--task", "arithmetic", "--num-prompts", "1", "--length", "200", "--plot", "{text}/a.png"),
            "there is no directory",
        ),
        (("--num-prompts", "0"), "--num-prompts must be at least 1"),
        (("--seed", "-1"), "--seed must be at least 0"),
        (("--num-documents", "1", "--perplexity", "generated"), "--num-documents must be at least 2"),
        (("--task", "none", "--perplexity", "generated", "--plot", "x.png"), "run one of them or leave it out"),
        (
            ("--task", "none", "--perplexity", "absent.txt", "--length", "100"),
            "absent.txt cannot be read \\(No such file",
        ),
        (
            ("--task", "none", "--perplexity", "{text}", "--length", "500"),
            "has 900 tokens, fewer than two documents of 500",
        ),
        (("--task", "none", "--perplexity", "{binary}", "--length", "50"), "binary is not UTF-8 at byte 1"),
        (("--task", "none", "--perplexity", "generated", "--length", "40"), "documents of 40 tokens hold no fact"),
        (("--task", "none", "--perplexity", "generated", "--length", "513"), "exceed the max_seq_len 512"),
        (
            ("--task", "arithmetic", "--length", "500"),
            "500 tokens and 48 for the answer exceed the engine's max_seq_len",
        ),
        (("--length", "500", "--perplexity", "generated"), "500 tokens and 48 for the answer exceed"),
        (("--teacher", "absent", "--length", "100"), "absent is not an engine directory"),
        (("--task", "none", "--early-exit", "--length", "300"), "early exit"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    arguments: tuple[str, ...],
    message: str,
    engines: EngineShelf,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "binary").write_bytes(b"a\xff")
    text.write_text("x" * 900)
    filled = [argument.format(text=text, binary=tmp_path / "binary") for argument in arguments]
    assert main(["eval", str(engines.engine(PLAIN)), *filled]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, error), error


def test_generated_documents_are_seeded_and_hold_answers() -> None:
    tokenizer = Tokenizer.from_dir(ASSETS / "tiny-teacher")
    assert tokenizer is not None
    documents = generated_documents(tokenizer, 6, 300, seed=3)
    assert documents[:2] == generated_documents(tokenizer, 2, 300, seed=3)
    assert documents != generated_documents(tokenizer, 6, 300, seed=4)
    for document in documents:
        assert 270 <= len(document) <= 300 and document[0] == 0
        assert tokenizer.decode(document).count("\nAnswer: ") >= 2
    assert max(len(document) for document in generated_documents(tokenizer, 2, 6000, seed=0)) <= 6000


def test_pieces_of_a_text_are_spread_over_it(text: Path) -> None:
    tokenizer = Tokenizer.from_dir(ASSETS / "tiny-teacher")
    assert tokenizer is not None
    body = tokenizer.encode(text.read_text(), add_special_tokens=False)
    pieces = text_documents(text, tokenizer, 4, 51)
    assert [piece[0] for piece in pieces] == [0] * 4 and all(len(piece) == 51 for piece in pieces)
    num = len(body) // 50
    assert [piece[1:] for piece in pieces] == [
        body[s * 50 : s * 50 + 50] for s in (0, num // 4, num // 2, 3 * num // 4)
    ]
    with pytest.raises(KvforgeError, match="fewer than two documents of 1;"):
        text_documents(text, tokenizer, 4, 1)
