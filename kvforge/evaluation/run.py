"""Everything ``kvforge eval`` measures of one engine, and of its teacher on the same prompts and documents."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.engine import load_manifest
from kvforge.errors import EngineError, KvforgeError
from kvforge.evaluation import engine as engines
from kvforge.evaluation.compare import check_documents, check_vocabularies, compare_with_teacher, fidelity, perplexity
from kvforge.evaluation.documents import generated_documents, text_documents
from kvforge.evaluation.early_exit import Alignment, alignment
from kvforge.evaluation.paired import paired_difference
from kvforge.evaluation.score import TaskScore, is_correct, make_score
from kvforge.runtime import LLM
from kvforge.runtime.scoring import score
from kvforge.tasks import TASKS
from kvforge.tasks.prompt import Example, make_examples

GENERATED = "generated"


@dataclass(frozen=True)
class EvalOptions:
    """What to measure. ``length`` is that of prompts and of documents in tokens, ``<s>`` included; ``documents`` is a
    text file, ``generated`` or nothing."""

    tasks: tuple[str, ...] = tuple(TASKS)
    num_prompts: int = 200
    length: int = 1000
    seed: int = 0
    documents: str | None = None
    num_documents: int = 32
    early_exit: bool = False

    def __post_init__(self) -> None:
        """Raise KvforgeError for a task or a number that is none."""
        unknown = [name for name in self.tasks if name not in TASKS]
        if unknown:
            raise KvforgeError(f"unknown task {unknown[0]!r}; choose from {', '.join(TASKS)}")
        for name, value, least in (
            ("--num-prompts", self.num_prompts, 1),
            ("--length", self.length, 2),
            ("--num-documents", self.num_documents, 2),
        ):
            if value < least:
                raise KvforgeError(f"{name} must be at least {least}")


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

    def to_json(self) -> dict[str, Any]:
        """Return what there is as JSON-ready data."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def run_evaluation(engine: Path, teacher: Path | None, options: EvalOptions, *, use_tqdm: bool = False) -> Report:
    """Measure documents, then tasks.

    Engines are loaded one after another for the tasks, which need their whole cache, and together, with a cache for
    one document each, for the rest.

    Raises:
        KvforgeError: an engine cannot do what is asked, or the two have other vocabularies.
    """
    documents, exits = None, None
    if teacher is not None:
        load_manifest(teacher)  # before hours of work
    if options.documents is not None:
        for directory in (engine, teacher):
            if options.tasks and directory is not None:
                engines.check_length(load_manifest(directory), options.length)
        documents, exits = measure_documents(engine, teacher, options, use_tqdm)
        gc.collect()  # a GPU has no room for two caches
    scores = score_tasks(engine, teacher, options, use_tqdm) if options.tasks else []
    return Report(str(engine), None if teacher is None else str(teacher), scores, documents, exits)


def measure_documents(
    engine: Path, teacher: Path | None, options: EvalOptions, use_tqdm: bool
) -> tuple[dict[str, Any], Alignment | None]:
    """Return perplexity, with a teacher KL and agreement, and the alignment of the early exit where asked for."""
    assert options.documents is not None
    student = _open_for(engine, options.length)
    other = None if teacher is None else _open_for(teacher, options.length)
    if other is not None:
        check_vocabularies(student, other)
    if student.tokenizer is None:
        raise EngineError(f"{engine} has no tokenizer/tokenizer.json; rebuild it from a checkpoint that has one")
    if options.documents == GENERATED:
        documents = generated_documents(student.tokenizer, options.num_documents, options.length, options.seed)
    else:
        path = Path(options.documents)
        documents = text_documents(path, student.tokenizer, options.num_documents, options.length)
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
    return found, alignment(student, _requests(documents), use_tqdm=use_tqdm) if options.early_exit else None


def score_tasks(engine: Path, teacher: Path | None, options: EvalOptions, use_tqdm: bool) -> list[dict[str, Any]]:
    """Return a row per task: exact match and, with a teacher, its exact match and the difference paired by prompt."""
    generator = engines.EngineGenerator(engine, options.length, show_progress=use_tqdm)
    try:
        examples = {
            task: make_examples(task, options.length - 1, generator.count_tokens, options.num_prompts, options.seed)
            for task in options.tasks
        }
    except ValueError as error:
        raise KvforgeError(str(error)) from None
    right = _answer(generator, examples, use_tqdm)
    del generator
    gc.collect()
    rows = [asdict(_score(task, right[task], options)) for task in options.tasks]
    if teacher is not None:
        reference = _answer(
            engines.EngineGenerator(teacher, options.length, show_progress=use_tqdm), examples, use_tqdm
        )
        for row in rows:
            task = row["task"]
            row["teacher"] = asdict(_score(task, reference[task], options))
            row["versus_teacher"] = asdict(paired_difference(reference[task], right[task]))
    return rows


def _answer(
    generator: "engines.EngineGenerator", examples: dict[str, list[Example]], use_tqdm: bool
) -> dict[str, list[bool]]:
    """Return whether each prompt of each task was answered right."""
    right = {}
    with tqdm(examples.items(), unit="task", leave=False, disable=None if use_tqdm else True) as bar:
        for task, wanted in bar:
            bar.set_description(task)
            texts = generator([example.prompt for example in wanted])
            right[task] = [is_correct(example, text) for example, text in zip(wanted, texts, strict=True)]
    return right


def _score(task: str, right: Sequence[bool], options: EvalOptions) -> TaskScore:
    return make_score(task, options.length, options.seed, right)


def _requests(documents: Sequence[list[int]]) -> list[tuple[list[int], list[int]]]:
    return [(document[:1], document[1:]) for document in documents]


def _open_for(directory: Path, length: int) -> LLM:
    """Load an engine with a cache for one document of ``length`` tokens."""
    manifest = load_manifest(directory)
    if length > manifest.max_seq_len:
        raise KvforgeError(
            f"documents of {length} tokens exceed the max_seq_len {manifest.max_seq_len} of {directory}; use a "
            "smaller --length or rebuild with a larger --max-seq-len"
        )
    return LLM(directory, num_pages=-(-length // manifest.page_size), max_seq_len=length)
