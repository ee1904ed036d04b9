"""How far a student's next-token distributions are from its teacher's, token by token through two engines."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import exp, inf

from torch import Tensor
from tqdm import tqdm

from kvforge.common.errors import KvforgeError
from kvforge.evaluation.bootstrap import Estimate, bootstrap_interval
from kvforge.runtime import LLM
from kvforge.runtime.requests.checks import longer_sequences
from kvforge.runtime.scoring.score import lowest_argmax, score_chunk, stream_logits


@dataclass(frozen=True)
class Comparison:
    """Sums over the scored tokens of each document: all but its first. Natural logarithms."""

    num_tokens: tuple[int, ...]
    kl: tuple[float, ...]
    """KL(teacher || student) of the next-token distributions at temperature 1"""
    num_agree: tuple[int, ...]
    """tokens before which both models' most probable next token is the same"""
    student_nll: tuple[float, ...]
    teacher_nll: tuple[float, ...]


def compare_with_teacher(
    student: LLM, teacher: LLM, documents: Sequence[Sequence[int]], *, use_tqdm: bool = False
) -> Comparison:
    """Score documents (token ids, at least two each) with both models, a few tokens of one document at a time.

    Each is scored as ``kvforge.runtime.scoring.score`` does, from its first token on.

    Raises:
        KvforgeError: the vocabularies differ, or a document is too short or too long for one of the engines.
    """
    check_vocabularies(student, teacher)
    limit = min(llm.engine.config.max_seq_len for llm in (student, teacher))
    check_documents(documents, limit)
    chunk = min(
        min(llm.engine.manifest.max_num_survivors, llm.engine.config.max_num_tokens) for llm in (student, teacher)
    )
    rows = []
    total = sum(len(document) - 1 for document in documents)
    with tqdm(total=total, desc="Comparing", unit="tok", disable=None if use_tqdm else True, dynamic_ncols=True) as bar:
        for document in documents:
            rows.append(_compare_document(student, teacher, document, chunk))
            bar.update(len(document) - 1)
    columns = list(zip(*rows, strict=True)) or [()] * 4
    return Comparison(tuple(len(document) - 1 for document in documents), *columns)


def _compare_document(
    student: LLM, teacher: LLM, document: Sequence[int], chunk: int
) -> tuple[float, int, float, float]:
    request = [(document[:1], document[1:])]
    kl, num_agree, student_nll, teacher_nll = 0.0, 0, 0.0, 0.0
    with (
        closing(stream_logits(student, request, max_survivors=chunk)) as ours,
        closing(stream_logits(teacher, request, max_survivors=chunk)) as theirs,
    ):
        for mine, other in zip(ours, theirs, strict=True):
            student_nll -= float(score_chunk(mine)[0].sum())
            teacher_nll -= float(score_chunk(other)[0].sum())
            kl += float(kl_divergence(other.logits, mine.logits).sum())
            num_agree += int((lowest_argmax(mine.logits) == lowest_argmax(other.logits)).sum())
    return kl, num_agree, student_nll, teacher_nll


def kl_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher || student) [k] float64, in nats, of the distributions that logits [k, vocab] describe."""
    log_p, log_q = teacher.double().log_softmax(-1), student.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def fidelity(comparison: Comparison, seed: int = 0) -> dict[str, dict[str, float]]:
    """Return ``kl`` (nats per token), ``agreement`` (0..1) and both perplexities, each as {value, low, high}: means
    over all tokens with 95% bootstrap intervals over documents. Raises KvforgeError for fewer than two documents."""
    counts = comparison.num_tokens
    return {
        "kl": asdict(mean_per_token(comparison.kl, counts, seed)),
        "agreement": asdict(mean_per_token(comparison.num_agree, counts, seed)),
        "perplexity": asdict(perplexity(comparison.student_nll, counts, seed)),
        "teacher_perplexity": asdict(perplexity(comparison.teacher_nll, counts, seed)),
    }


def mean_per_token(sums: Sequence[float], counts: Sequence[int], seed: int = 0) -> Estimate:
    """Return ``bootstrap_interval``; raises KvforgeError for fewer than two documents."""
    try:
        return bootstrap_interval(sums, counts, seed=seed)
    except ValueError as error:
        raise KvforgeError(f"{error}.") from None


def perplexity(nll: Sequence[float], counts: Sequence[int], seed: int = 0) -> Estimate:
    """Return exp(mean negative log-probability per token) with the same function of that mean's interval; infinite
    where that is beyond a float, for means above 709."""
    mean = mean_per_token(nll, counts, seed)
    return Estimate(*(exp(nats) if nats < 709 else inf for nats in (mean.value, mean.low, mean.high)))


def check_vocabularies(student: LLM, teacher: LLM) -> None:
    """Raise KvforgeError unless both engines mean the same tokens by the same ids, as far as can be known."""
    ours, theirs = student.engine.manifest.vocab_size, teacher.engine.manifest.vocab_size
    if ours != theirs:
        raise KvforgeError(
            f"the teacher has {theirs} tokens in its vocabulary and the engine {ours}; compare it with its own teacher."
        )
    tokenizers = [llm.tokenizer.backend.get_vocab() for llm in (student, teacher) if llm.tokenizer is not None]
    if len(tokenizers) == 2 and tokenizers[0] != tokenizers[1]:
        raise KvforgeError("the teacher's tokenizer has other tokens; compare the engine with its own teacher.")


def check_documents(documents: Sequence[Sequence[int]], max_seq_len: int) -> None:
    """Raise KvforgeError unless every document has a token to score and fits."""
    for index, document in enumerate(documents):
        if not 2 <= len(document) <= max_seq_len:
            raise KvforgeError(
                f"document {index} has {len(document)} tokens and 2 to {max_seq_len} can be scored; split it, or "
                f"{longer_sequences(max_seq_len)}."
            )
