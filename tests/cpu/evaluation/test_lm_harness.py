"""An engine in lm-evaluation-harness: scores against transformers, local tasks, and the paper's presets."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer

from kvforge.cli import main
from kvforge.compiler import BuildOptions, build_engine
from kvforge.engine import TOKENIZER_DIR
from kvforge.errors import KvforgeError
from kvforge.evaluation.lm_tasks import PAPER_TASKS
from kvforge.runtime import SamplingParams
from kvforge.runtime.tokenizer import Tokenizer
from kvforge.tasks.prompt import make_example
from tests.support.engines import PLAIN, SWIFTKV, EngineShelf, with_tokens_around

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is an extra")
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from kvforge.evaluation.lm_harness import EngineLM
from kvforge.evaluation.lm_harness import main as harness_main
from kvforge.evaluation.lm_run import task_manager

ROOT = Path(__file__).resolve().parents[3]
TEXTS = ["the cat sat", " on the mat,", "naïve 😀", "zzzz 0123"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # noqa: E501


def instance(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def loglikelihoods(model: EngineLM, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    return model.loglikelihood([instance("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)


class Reference:
    """The same numbers from transformers, one text at a time."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.no_grad()
    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = torch.tensor([context + continuation])
        logprobs = self.model(ids).logits[0, :-1].double().log_softmax(-1)[len(context) - 1 :]
        targets = ids[0, len(context) :]
        return float(logprobs.gather(1, targets[:, None]).sum()), bool((logprobs.argmax(-1) == targets).all())

    @torch.no_grad()
    def greedy(self, context: list[int], count: int) -> list[int]:
        ids = list(context)
        for _ in range(count):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(context) :]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets this for its own process."""
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.fixture(scope="module")
def model(engines: EngineShelf) -> EngineLM:
    return EngineLM(engines.engine(PLAIN))


@pytest.fixture(scope="module")
def reference(engines: EngineShelf) -> Reference:
    return Reference(engines.checkpoint(PLAIN))


def byte_ids(text: str) -> list[int]:
    """PLAIN's tokenizer: a token for each byte."""
    return [byte + 3 for byte in text.encode()]


def test_loglikelihoods_are_those_of_transformers(model: EngineLM, reference: Reference) -> None:
    pairs = [(a, b) for a in TEXTS for b in TEXTS]
    greedy = reference.greedy(byte_ids(TEXTS[0]), 1)[0] - 3
    pairs += [(TEXTS[0], chr(greedy)), ("ends with a space ", "x"), ("", "no context"), ("  ", "x")]
    expected = [reference.score(byte_ids(a) or [1], byte_ids(b)) for a, b in pairs[:-3]]
    expected.append(reference.score(byte_ids("ends with a space"), byte_ids(" x")))
    expected.append(reference.score([1], byte_ids("no context")))
    expected.append(reference.score([1], byte_ids("  x")))
    found = loglikelihoods(model, pairs)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-3)
    assert [top for _, top in found] == [top for _, top in expected]
    assert greedy >= 128 or found[-4][1], "a greedy continuation is found greedy"


def test_contexts_are_cut_from_the_left_and_continuations_are_not(
    engines: EngineShelf, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    model = EngineLM(engines.engine(PLAIN), max_length=20)
    context, continuation = "a" * 8 + "0123456789" * 3, "xyz"
    ((total, _),) = loglikelihoods(model, [(context, continuation)])
    expected, _ = reference.score(byte_ids(context)[-17:], byte_ids(continuation))
    assert total == pytest.approx(expected, abs=1e-3)
    assert "1 of 1 contexts exceed 20 tokens" in caplog.text
    with pytest.raises(KvforgeError, match="a continuation of 20 tokens leaves no context within the engine's 20"):
        loglikelihoods(model, [("a", "b" * 20)])
    request = instance("generate_until", context, {"until": [], "max_gen_toks": 4})
    (text,) = model.generate_until([request], disable_tqdm=True)
    ids = reference.greedy(byte_ids(context)[-16:], 4)
    assert text == model.tokens.decode(ids[: ids.index(2)] if 2 in ids else ids)


def test_an_answer_that_its_context_swallows_is_refused(model: EngineLM) -> None:
    """A tokenizer may merge the two into no more tokens than the context has; no tokens would be the best answer."""
    with pytest.raises(KvforgeError, match="leaves the answer 'b' no token of its own"):
        model._loglikelihood_tokens([(("a", "b"), [5], [])], disable_tqdm=True)


def test_answers_leave_room_for_the_prompt(engines: EngineShelf) -> None:
    model = EngineLM(engines.engine(PLAIN), max_length=20, max_gen_toks=1024)
    assert model.max_gen_toks == 10
    request = instance("generate_until", "a" * 30, {"until": []})
    assert len(model.tokens.encode(model.generate_until([request], disable_tqdm=True)[0])) <= 40
    for count in (20, 0):
        request = instance("generate_until", "a", {"until": [], "max_gen_toks": count})
        with pytest.raises(KvforgeError, match=f"generates {count} tokens and the engine takes 20, prompt included"):
            model.generate_until([request], disable_tqdm=True)


@pytest.mark.parametrize("length", [5, 19, 20, 50])
def test_rolling_windows_score_every_token_once(engines: EngineShelf, reference: Reference, length: int) -> None:
    model = EngineLM(engines.engine(PLAIN), max_length=20)
    ids = byte_ids(("lorem ipsum dolor sit amet " * 3)[:length])
    text = model.tokens.decode(ids)
    found = model.loglikelihood_rolling([instance("loglikelihood_rolling", text)] * 2, disable_tqdm=True)
    expected = reference.score([1], ids[:19])[0]
    for end in range(38, length + 19, 19):  # further windows: 20 tokens, of which the last ones are not scored yet
        end = min(end, length)
        done = (end - 1) // 19 * 19
        expected += reference.score(ids[max(end - 20, 0) : done], ids[done:end])[0] if end > done else 0
    assert found == pytest.approx([expected] * 2, abs=2e-3)
    assert model.loglikelihood_rolling([instance("loglikelihood_rolling", "")], disable_tqdm=True) == [0]


def test_generation_is_greedy_and_ends_at_stop_strings(model: EngineLM, reference: Reference) -> None:
    def generate(context: str, **options: Any) -> str:
        return model.generate_until([instance("generate_until", context, options)], disable_tqdm=True)[0]

    ids = reference.greedy(byte_ids(TEXTS[0]), 24)
    ids = ids[: ids.index(2)] if 2 in ids else ids
    whole = model.tokens.decode(ids)
    assert generate(TEXTS[0], until=[], max_gen_toks=24) == whole
    assert generate(TEXTS[0], until="", max_gen_toks=24, do_sample=False, temperature=1.0) == whole
    place = next(i for i in range(2, len(whole)) if whole[i].isascii() and whole[i] not in whole[:i])
    assert generate(TEXTS[0], until=["never", whole[place]], max_gen_toks=24) == whole[:place]
    stop = next(whole[i : i + 3] for i in range(2, len(whole) - 2) if whole[i : i + 3].isascii())
    assert generate(TEXTS[0], until=[stop], max_gen_toks=24) == whole[: whole.index(stop)], "of three tokens"
    end = next(i for i, token in enumerate(ids) if token >= 3 and token not in ids[:i] and i > 2)
    special = {"until": ["</s>", model.tokens.backend.id_to_token(ids[end])], "max_gen_toks": 24}
    assert whole.startswith(generate(TEXTS[0], **special))
    sampled = {generate(TEXTS[0], until=[], do_sample=True, temperature=5.0, seed=s, max_gen_toks=8) for s in range(4)}
    assert len(sampled) > 1
    with pytest.raises(KvforgeError, match="sets num_beams for generation, which the engine does not have"):
        generate(TEXTS[0], until=[], num_beams=4)
    model.llm.engine.runner, runner = None, model.llm.engine.runner  # type: ignore[assignment]
    try:
        with pytest.raises(KvforgeError, match="no score"):
            generate(TEXTS[0], until=[])
    finally:
        model.llm.engine.runner = runner


@pytest.fixture(scope="module")
def chat_model(engines: EngineShelf, tmp_path_factory: pytest.TempPathFactory) -> EngineLM:
    """A SwiftKV engine whose tokenizer puts `<s>` before a text, and with a chat template."""
    folder = with_tokens_around(engines.engine(SWIFTKV), tmp_path_factory.mktemp("chat") / "engine", before="<s>")
    (folder / TOKENIZER_DIR / "chat_template.jinja").write_text(TEMPLATE)
    return EngineLM(folder)


def test_chat_templates(model: EngineLM, chat_model: EngineLM) -> None:
    history = [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "The answer is "}]
    assert chat_model.chat_template(True) == TEMPLATE and chat_model.chat_template(False) is None
    assert chat_model.apply_chat_template(history[:1]) == "[user]two and two?</s>[assistant]"
    continued = chat_model.apply_chat_template(history, add_generation_prompt=False)
    assert continued == "[user]two and two?</s>[assistant]The answer is"
    assert chat_model.tokenizer_name != model.tokenizer_name
    for call in (lambda: model.chat_template(True), lambda: model.apply_chat_template(history)):
        with pytest.raises(KvforgeError, match="this engine has no chat template"):
            call()
    with pytest.raises(KvforgeError, match="no chat template named 'rag'"):
        chat_model.chat_template("rag")


def test_stop_strings_that_are_special_tokens_are_ids_and_other_added_tokens_are_not(
    model: EngineLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = BackendTokenizer.from_str(model.tokens.backend.to_str())
    backend.add_tokens([AddedToken("\n\n", special=False)])
    monkeypatch.setattr(model, "tokens", Tokenizer(backend))
    params = model._sampling({"until": ["</s>", "\n\n", ""]})
    assert (params.stop, params.stop_token_ids) == (("\n\n",), (2,))


def test_what_stands_before_a_text(model: EngineLM, chat_model: EngineLM) -> None:
    assert (model.prefix_token_id, model.eot_token_id) == (1, 2)
    assert model.tok_encode("a") == byte_ids("a")
    assert chat_model.tok_encode("a") == [1, *byte_ids("a")]
    assert chat_model.tok_encode("a", add_special_tokens=False) == byte_ids("a")
    assert chat_model.tok_encode("<s>a") == [1, *byte_ids("a")], "only once"


def test_a_swiftkv_engine_scores_what_it_generates(chat_model: EngineLM) -> None:
    """Greedy tokens are the most probable ones, though they are scored together and were generated one by one."""
    prompts = [chat_model.tok_encode(text) for text in TEXTS]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = [r.outputs[0].token_ids for r in chat_model.llm.generate(prompts, params, use_tqdm=False)]
    pairs = [(None, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    assert all(top for _, top in chat_model._loglikelihood_tokens(pairs, disable_tqdm=True))
    spoiled = [(None, prompt, [*answer[:5], answer[5] ^ 1, *answer[6:]]) for _, prompt, answer in pairs]
    assert not any(top for _, top in chat_model._loglikelihood_tokens(spoiled, disable_tqdm=True))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three tasks on a data set in it: multiple choice, generation and perplexity."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": f"{i} and {i}?", "options": ["one", "two!", "3"], "gold": i % 3} for i in range(8)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"""dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}
test_split: test
fewshot_split: train
doc_to_text: "Q: {{{{question}}}}\\nA:"
"""
    (folder / "local_choice.yaml").write_text(
        f"task: local_choice\n{common}output_type: multiple_choice\ndoc_to_target: gold\n"
        "doc_to_choice: '{{options}}'\nmetric_list:\n- {metric: acc}\n- {metric: acc_norm}\n"
    )
    (folder / "local_generate.yaml").write_text(
        f"task: local_generate\n{common}output_type: generate_until\ndoc_to_target: '{{{{options[gold]}}}}'\n"
        "generation_kwargs: {until: ['Q:'], max_gen_toks: 6}\nmetric_list:\n- {metric: exact_match}\n"
    )
    rolling = common.replace('"Q: {{question}}\\nA:"', '""')
    (folder / "local_rolling.yaml").write_text(
        f"task: local_rolling\n{rolling}output_type: loglikelihood_rolling\ndoc_to_target: '{{{{question}}}}'\n"
        "metric_list:\n- {metric: bits_per_byte}\n"
    )
    (folder / "local_group.yaml").write_text("group: local_group\ntask: [local_choice, local_rolling]\n")
    return folder


def test_local_tasks_through_the_command(
    engines: EngineShelf,
    reference: Reference,
    tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    options = ["--include-path", str(tasks), "--tasks", "local_generate,local_group", "--json"]
    assert main(["lm-eval", str(engines.engine(PLAIN)), *options]) == 0
    scores = {(s["name"], s["metric"]): s for s in json.loads(capsys.readouterr().out)["scores"]}
    assert set(scores) == {
        ("local_generate", "exact_match,none"),
        ("local_choice", "acc,none"),
        ("local_choice", "acc_norm,none"),
        ("local_rolling", "bits_per_byte,none"),
    }
    assert {s["num_samples"] for s in scores.values()} == {8}
    right = 0
    bits = 0.0
    questions = [f"{i} and {i}?" for i in range(8)]
    for i, question in enumerate(questions):
        context = byte_ids(f"Q: {question}\nA:")
        totals = [reference.score(context, byte_ids(f" {option}"))[0] for option in ("one", "two!", "3")]
        right += totals.index(max(totals)) == i % 3
        bits -= reference.score([1], byte_ids(question))[0]
    assert scores["local_choice", "acc,none"]["value"] == right / 8
    expected = bits / sum(len(question) for question in questions) / torch.tensor(2.0).log().item()
    assert scores["local_rolling", "bits_per_byte,none"]["value"] == pytest.approx(expected, abs=1e-3)
    assert main(["lm-eval", str(engines.engine(PLAIN)), *options[:2], "--tasks", "local_choice", "--limit", "3"]) == 0
    table = capsys.readouterr().out
    assert table.count("local_choice") == 2 and " 3 " in table


def test_scores_before_a_task_that_fails_are_printed(
    engines: EngineShelf, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(model: EngineLM, tasks: list[str], **options: Any) -> dict[str, Any]:
        if tasks == ["winogrande"]:
            assert options["num_fewshot"] == 5 and options["fewshot_as_multiturn"] is False and options["limit"] == 2
            results = {"winogrande": {"alias": "winogrande", "acc,none": 0.5, "acc_stderr,none": "N/A"}}
            samples = {"winogrande": {"original": 9, "effective": 2}}
            return {"results": results, "n-samples": samples, "n-shot": {"winogrande": 5}, "group_subtasks": {}}
        raise ConnectionError("no such host\nsecond line")

    monkeypatch.setattr("lm_eval.simple_evaluate", evaluate)
    options = ["--include-path", str(tasks), "--tasks", "winogrande,hellaswag", "--limit", "2", "--json"]
    assert main(["lm-eval", str(engines.engine(PLAIN)), *options]) == 1
    captured = capsys.readouterr()
    (score,) = json.loads(captured.out)["scores"]
    assert score == {
        "name": "winogrande",
        "task": "winogrande",
        "num_fewshot": 5,
        "metric": "acc,none",
        "value": 0.5,
        "stderr": None,
        "num_samples": 2,
    }
    assert "the task hellaswag cannot be run (no such host); its data set has to be reachable" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "chess-boxing"], "there is no task 'chess-boxing'; choose from arc-challenge, winogrande"),
        (["--tasks", "gsm8k"], "has no chat template, which some of the paper's tasks need"),
        (["--limit", "0"], "--limit is 0; give 1 or more"),
        (["--tasks", ","], "--tasks names no task"),
        (["--include-path", "nowhere"], "--include-path nowhere is not a directory"),
    ],
)
def test_refusals_are_one_sentence(
    engines: EngineShelf, tasks: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lm-eval", str(engines.engine(PLAIN)), "--include-path", str(tasks), *options]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


def test_models_that_cannot_be_made_are_refused(engines: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvforgeError, match="needs an engine; give --model_args engine=DIR"):
        EngineLM()
    with pytest.raises(KvforgeError, match="max_gen_toks is 0"):
        EngineLM(engines.engine(PLAIN), max_gen_toks=0)
    monkeypatch.setattr("kvforge.runtime.LLM.tokenizer", None)
    with pytest.raises(KvforgeError, match="no tokenizer"):
        EngineLM(engines.engine(PLAIN))


def test_the_harness_has_its_own_command(
    engines: EngineShelf, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    options = ["run", "--model", "kvforge", "--include_path", str(tasks), "--tasks", "local_generate", "--limit", "2"]
    monkeypatch.setattr("sys.argv", ["lm_eval", *options, "--model_args", f"engine={engines.engine(PLAIN)}"])
    assert harness_main() == 0
    assert re.search(r"\|local_generate\|.*\|exact_match\|", capsys.readouterr().out)
    monkeypatch.setattr("sys.argv", ["lm_eval", *options, "--model_args", "engine=absent"])
    assert harness_main() == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("kvforge: error: absent is not an engine directory")


@pytest.fixture(scope="module")
def manager(tasks: Path) -> TaskManager:
    return task_manager(tasks)


def configurations(manager: TaskManager, name: str) -> list[dict[str, Any]]:
    """The definitions of a task, or of all tasks below a group or tag."""
    entry = manager.task_index[name]
    config = entry.cfg or {}
    parts = config.get("task") if entry.kind.name == "GROUP" else None
    if entry.kind.name == "TAG":
        parts = [task for task, e in manager.task_index.items() if name in e.tags]
    if parts is None:
        return [config]
    return [leaf for part in parts for leaf in configurations(manager, part)]


@pytest.mark.parametrize("preset", PAPER_TASKS, ids=lambda preset: preset.name)
def test_presets_are_tasks_of_the_installed_harness(manager: TaskManager, preset) -> None:
    """Their definitions have the metric, examples where the preset asks for some, and turns that end."""
    leaves = configurations(manager, preset.task)
    assert len(leaves) == (57 if preset.name.startswith("mmlu") else 1)
    metric, filtered = preset.metric.split(",")
    for leaf in leaves:
        assert metric in [entry["metric"] for entry in leaf["metric_list"]]
        filters = [entry["name"] for entry in leaf.get("filter_list", [{"name": "none"}])]
        assert filtered in filters
        if preset.num_fewshot:
            splits = (leaf.get("fewshot_split"), leaf.get("training_split"), leaf.get("validation_split"))
            assert any(splits) or "samples" in leaf.get("fewshot_config", {})
        assert preset.apply_chat_template == (leaf["output_type"] == "generate_until")
        assert preset.apply_chat_template or not preset.fewshot_as_multiturn


def test_presets_are_the_papers() -> None:
    shots = {preset.name: preset.num_fewshot for preset in PAPER_TASKS}
    assert shots == {
        "arc-challenge": 0,
        "winogrande": 5,
        "hellaswag": 10,
        "truthfulqa": 0,
        "mmlu": 5,
        "mmlu-cot": 0,
        "gsm8k": 8,
    }


def test_the_tiny_teacher_answers_as_in_transformers(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """On prompts that it was trained for, in float32."""
    if not request.config.getoption("--full"):
        pytest.skip("builds an engine; --full")
    checkpoint = ROOT / "model_defs/assets/tiny-teacher"
    build_engine(checkpoint, tmp_path / "engine", BuildOptions(dtype="float32"))
    model, reference = EngineLM(tmp_path / "engine"), Reference(checkpoint)
    examples = [
        make_example(task, 300, lambda text: len(model.tok_encode(text)), random.Random(f"{task}{i}"))
        for task in ("needle_single", "variables", "list_recall", "arithmetic")
        for i in range(4)
    ]
    pairs = [(e.prompt, answer) for e in examples for answer in (f" {e.answer}.", " 123.")]
    expected = [reference.score(*model._encode_pair(*pair)) for pair in pairs]
    found = loglikelihoods(model, pairs)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-3)
    assert [top for _, top in found] == [top for _, top in expected] and 0 < sum(top for _, top in found) < len(found)
