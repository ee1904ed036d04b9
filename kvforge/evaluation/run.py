"""Everything ``kvforge eval`` measures of one engine, and of its teacher on the same prompts and documents."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from kvforge.common.errors import EngineError, KvforgeError
from kvforge.evaluation import engine as engines
from kvforge.evaluation.compare import check_documents, check_vocabularies, compare_with_teacher, fidelity, perplexity
from kvforge.evaluation.documents import generated_documents, text_documents
from kvforge.evaluation.early_exit import Alignment, alignment
from kvforge.evaluation.exit_quality import ExitQuality, answer_with_exits, exit_quality
from kvforge.evaluation.paired import paired_difference
from kvforge.evaluation.score import MAX_ANSWER_TOKENS, TaskScore, is_correct, make_score, share_found
from kvforge.manifest import load_manifest
from kvforge.runtime import LLM
from kvforge.runtime.requests.checks import longer_sequences
from kvforge.runtime.scoring.score import score
from kvforge.runtime.sessions.missing import NO_EARLY_EXIT
from kvforge.tasks import DEFAULT_TASKS, TASKS
from kvforge.tasks.prompt import Example, make_examples

GENERATED = "generated"
Examples = dict[str, list[Example]]
Answers = dict[str, list[engines.AnsweredPrompt]]


@dataclass(frozen=True)
class EvalOptions:
    """What to measure. ``length`` is that of prompts and of documents in tokens, ``<s>`` included; ``documents`` is a
    text file, ``generated`` or nothing; ``early_exit`` says on which tokens it is held against the full model: all of
    the documents, or the full model's own answers to the tasks' prompts. With ``early_exit_threshold`` the tasks are
    also answered with exits of generated tokens above it, and with ``early_exit_prompts`` once more, with exits of the
    prompts' last tokens too."""

    tasks: tuple[str, ...] = DEFAULT_TASKS
    num_prompts: int = 200
    length: int = 1000
    seed: int = 0
    documents: str | None = None
    num_documents: int = 32
    early_exit: Literal["documents", "answers"] | None = None
    early_exit_threshold: float | None = None
    early_exit_prompts: bool = False

    def __post_init__(self) -> None:
        """Raise KvforgeError for a task or a number that is none, or where there is nothing to measure."""
        unknown = [name for name in self.tasks if name not in TASKS]
        if unknown:
            raise KvforgeError(f"unknown task {unknown[0]!r}; choose from {', '.join(TASKS)}")
        for name, value, minimum in (
            ("--num-prompts", self.num_prompts, 1),
            ("--length", self.length, 2),
            ("--num-documents", self.num_documents, 2),
            ("--seed", self.seed, 0),
        ):
            if value < minimum:
                raise KvforgeError(f"{name} must be at least {minimum}")
        if self.early_exit_threshold is not None and not 0 < self.early_exit_threshold <= 1:
            raise KvforgeError("--early-exit-threshold must be a probability above 0, at most 1")
        if self.early_exit_prompts and self.early_exit_threshold is None:
            raise KvforgeError("--early-exit-prompts goes with --early-exit-threshold; add that, or leave it out")
        if not self.tasks and self.early_exit_threshold is not None:
            raise KvforgeError("--early-exit-threshold needs tasks to answer; run some or leave it out")
        if not self.tasks and self.early_exit == "answers":
            raise KvforgeError("--early-exit answers needs tasks to answer; run some or use --early-exit documents")
        if not self.tasks and self.documents is None:
            raise KvforgeError("--task none leaves nothing to measure; add --perplexity, --teacher or --early-exit")


@dataclass(frozen=True)
class Report:
    """What was found; see ``run_evaluation``."""

    engine: str
    teacher: str | None
    scores: list[dict[str, Any]]
    """per task: the fields of ``TaskScore`` and, with a teacher, ``teacher`` (the same) and ``versus_teacher``"""
    documents: dict[str, Any] | None = None
    """``source``, ``num_documents``, ``num_tokens``, and {value, low, high} of each measure"""
    early_exit: Alignment | None = None
    early_exit_on: str | None = None
    """``EvalOptions.early_exit``"""
    exits: ExitQuality | None = None
    """answers with exits of generated tokens above ``EvalOptions.early_exit_threshold``"""
    exits_of_prompts: ExitQuality | None = None
    """answers with exits of the prompts' last tokens too, where ``EvalOptions.early_exit_prompts``"""

    def to_json(self) -> dict[str, Any]:
        """Return what there is as JSON-ready data; a perplexity that is infinite as None."""
        found = {name: value for name, value in asdict(self).items() if value is not None}
        for measure in found.get("documents", {}).values():
            if isinstance(measure, dict):
                measure.update({part: None for part, value in measure.items() if not isfinite(value)})
        return found


def run_evaluation(engine: Path, teacher: Path | None, options: EvalOptions, *, use_tqdm: bool = False) -> Report:
    """Measure documents, then tasks.

    Engines are loaded one after another for the tasks, which need their whole cache, and together, with a cache for
    one document each, for the rest.

    Raises:
        KvforgeError: an engine cannot do what is asked, or the two have other vocabularies.
    """
    directories = [engine] if teacher is None else [engine, teacher]
    manifests = [load_manifest(directory) for directory in directories]
    for manifest in manifests if options.tasks else ():
        engines.check_length(manifest, options.length)
    if (options.early_exit or options.early_exit_threshold is not None) and not manifests[0].model.early_exit:
        raise EngineError(NO_EARLY_EXIT)
    examples = make_prompts(engine, options)  # what cannot be measured is refused before hours of work
    documents, exits = None, None
    leaving: list[ExitQuality] = []
    scores: list[dict[str, Any]] = []
    if options.documents is not None:
        documents, exits = measure_documents(engine, teacher, options, use_tqdm)
        gc.collect()  # a GPU has no room for two caches
    if examples:
        scores, exits_of_answers, leaving = score_tasks(engine, teacher, examples, options, use_tqdm)
        exits = exits or exits_of_answers
    name = None if teacher is None else str(teacher)
    return Report(str(engine), name, scores, documents, exits, options.early_exit, *leaving)


def make_prompts(engine: Path, options: EvalOptions) -> Examples:
    """Return the prompts of all tasks. Raises KvforgeError where a task does not fit ``length`` or its answers do not
    fit what is generated."""
    tokenizer = engines.load_tokenizer(engine)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    examples: Examples = {}
    for task in options.tasks:
        try:
            examples[task] = make_examples(task, options.length - 1, count, options.num_prompts, options.seed)
        except ValueError as error:
            raise KvforgeError(f"{error}, and --length counts one before them") from None
        longest = max(count(f" {example.answer}.") for example in examples[task])
        if longest > MAX_ANSWER_TOKENS:
            raise KvforgeError(
                f"answers of {task} take {longest} tokens of this tokenizer and {MAX_ANSWER_TOKENS} are generated; "
                "choose other tasks with --task"
            )
    return examples


def measure_documents(
    engine: Path, teacher: Path | None, options: EvalOptions, use_tqdm: bool
) -> tuple[dict[str, Any], Alignment | None]:
    """Return perplexity, with a teacher KL and agreement, and the alignment of the early exit where asked for."""
    assert options.documents is not None
    student = _open_for(engine, options.length)
    other = None if teacher is None else _open_for(teacher, options.length)
    if other is not None:
        check_vocabularies(student, other)
    tokenizer = engines.load_tokenizer(engine)
    if options.documents == GENERATED:
        documents = generated_documents(tokenizer, options.num_documents, options.length, options.seed)
    else:
        documents = text_documents(Path(options.documents), tokenizer, options.num_documents, options.length)
    check_documents(documents, student.engine.config.max_seq_len)
    if other is not None:
        measures = fidelity(compare_with_teacher(student, other, documents, use_tqdm=use_tqdm), options.seed)
    else:
        scored = score(student, _requests(documents), use_tqdm=use_tqdm)
        nll = [-float(tokens.logprobs.double().sum()) for tokens in scored]
        measures = {"perplexity": asdict(perplexity(nll, [len(tokens.logprobs) for tokens in scored], options.seed))}
    found = {
        "source": options.documents,
        "num_documents": len(documents),
        "num_tokens": sum(len(document) - 1 for document in documents),
        **measures,
    }
    wanted = options.early_exit == "documents"
    return found, alignment(student, _requests(documents), use_tqdm=use_tqdm) if wanted else None


def score_tasks(
    engine: Path, teacher: Path | None, examples: Examples, options: EvalOptions, use_tqdm: bool
) -> tuple[list[dict[str, Any]], Alignment | None, list[ExitQuality]]:
    """Return a row per task, the score and, with a teacher, its score and the difference paired by prompt; and, where
    asked for, the alignment of the early exit on the engine's own answers, and its answers with exits, first of
    generated tokens alone."""
    generator = engines.EngineGenerator(engine, options.length, show_progress=use_tqdm)
    answers = _answer(generator, examples, use_tqdm)
    exits = None
    if options.early_exit == "answers":
        said = [(answer.prompt, answer.token_ids) for given in answers.values() for answer in given]
        exits = alignment(generator.llm, said, use_tqdm=use_tqdm)
    del generator
    gc.collect()
    leaving = []
    threshold = options.early_exit_threshold
    if threshold is not None:
        for prompts in (False, True) if options.early_exit_prompts else (False,):
            found = answer_with_exits(engine, threshold, options.length, examples, prompts=prompts, use_tqdm=use_tqdm)
            leaving.append(exit_quality(examples, answers, found))
            gc.collect()
    right = _right(examples, answers)
    rows = [asdict(_score(task, examples, answers, right, options)) for task in examples]
    if teacher is not None:
        generator = engines.EngineGenerator(teacher, options.length, show_progress=use_tqdm)
        reference = _answer(generator, examples, use_tqdm)
        right_reference = _right(examples, reference)
        for row in rows:
            task = row["task"]
            row["teacher"] = asdict(_score(task, examples, reference, right_reference, options))
            row["versus_teacher"] = asdict(paired_difference(right_reference[task], right[task]))
    return rows, exits, leaving


def _answer(generator: engines.EngineGenerator, examples: Examples, use_tqdm: bool) -> Answers:
    answers = {}
    with tqdm(examples.items(), unit="task", leave=False, disable=None if use_tqdm else True) as bar:
        for task, wanted in bar:
            bar.set_description(task)
            answers[task] = generator.answer([example.prompt for example in wanted])
    return answers


def _right(examples: Examples, answers: Answers) -> dict[str, list[bool]]:
    """Return whether each prompt of each task was answered right."""
    return {
        task: [is_correct(example, answer.text) for example, answer in zip(wanted, answers[task], strict=True)]
        for task, wanted in examples.items()
    }


def _score(
    task: str, examples: Examples, answers: Answers, right: dict[str, list[bool]], options: EvalOptions
) -> TaskScore:
    shares = [share_found(example, a.text) for example, a in zip(examples[task], answers[task], strict=True)]
    return make_score(task, options.length, options.seed, right[task], shares)


def _requests(documents: Sequence[list[int]]) -> list[tuple[list[int], list[int]]]:
    return [(document[:1], document[1:]) for document in documents]


def _open_for(directory: Path, length: int) -> LLM:
    """Load an engine with a cache for one document of ``length`` tokens."""
    manifest = load_manifest(directory)
    if length > manifest.max_seq_len:
        raise KvforgeError(
            f"documents of {length} tokens exceed the max_seq_len {manifest.max_seq_len} of {directory}; use a "
            f"smaller --length, or {longer_sequences(manifest.max_seq_len)}."
        )
    return LLM(directory, num_pages=-(-length // manifest.page_size), max_seq_len=length)
