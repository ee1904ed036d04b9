"""StreamingLLM's figure (arXiv 2309.17453, figure 3): perplexity along a text of many times the window.

    python -m perf.eviction.streaming --output perf/results/streaming-perplexity

The tiny teacher reads texts token by token, as it would generate them: with the full cache; with the first tokens and
the newest ones, distances being those of places in the cache as in the paper, or those of the text; and with the newest
ones alone. All caches but the full one hold --window tokens. Perplexity is given for stretches of one window each, with
a 95% interval over texts (percentile bootstrap). Writes OUTPUT.json, .md and .png.
"""

import argparse
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.evaluation.documents import generated_documents
from kvforge.runtime import LLMEngine
from perf.harness.engines import TEACHER_DIR, cached_engine, tokenizer_of
from perf.harness.experiment import Experiment, Report, Row, number, output, work
from perf.harness.forced import forced_logits
from perf.harness.plots import panels

FULL = "full cache"
NUM_RESAMPLES = 1000
SHOWN = 5
"""Stretches in the table."""


def rows_of(window: int, sinks: int) -> dict[str, str]:
    """Return each row's KV policy."""
    streaming = f"streaming:budget={window},sinks={{}},cache_positions={{}}"
    return {
        FULL: "full",
        f"{sinks} sinks and the newest, places in the cache": streaming.format(sinks, 1),
        f"{sinks} sinks and the newest, places in the text": streaming.format(sinks, 0),
        "the newest alone": streaming.format(0, 0),
    }


def losses(engine: Path, texts: list[list[int]], name: str) -> np.ndarray:
    """Return the negative log-probability ``[texts, length]`` of each token but the first, which has 0."""
    result = np.zeros((len(texts), len(texts[0])))
    loaded = LLMEngine(engine, kv_cache_gib=1.0, enable_prefix_cache=False)
    with tqdm(total=result.size - len(texts), desc=name, unit="tok", dynamic_ncols=True) as bar:
        for index, place, logits in forced_logits(loaded, texts):
            top = logits.max()
            result[index, place] = top + np.log(np.exp(logits - top).sum()) - logits[texts[index][place]]
            bar.update()
    return result


def stretches(loss: np.ndarray, window: int) -> list[dict[str, float]]:
    """Return the perplexity of each stretch of ``window`` tokens, from the first token on, with its interval."""
    rng, result = np.random.default_rng(0), []
    for begin in range(0, loss.shape[1], window):
        mean = loss[:, max(1, begin) : begin + window].mean(axis=1)
        resampled = rng.choice(mean, (NUM_RESAMPLES, len(mean))).mean(axis=1)
        low, high = np.exp(np.quantile(resampled, (0.025, 0.975)))
        result.append({"begin": begin, "perplexity": float(np.exp(mean.mean())), "low": low, "high": high})
    return result


def columns(report: Report) -> list[tuple]:
    """Return the table's columns."""
    count = len(report["rows"][0]["stretches"])
    shown = sorted({round(i * (count - 1) / (SHOWN - 1)) for i in range(SHOWN)})

    def late(row: Row) -> float:
        values = [one["perplexity"] for one in row["stretches"]]
        return np.mean(values[-5:]) / np.mean(values[1:6])

    cell = "{0[perplexity]:.3f} ({0[low]:.3f}–{0[high]:.3f})"
    windows = [(f"window {index + 1}", lambda row, at=index: row["stretches"][at], cell) for index in shown]
    return [("cache", "name"), *windows, ("last 5 over windows 2 to 6", late, ".3f")]


def notes(report: Report) -> str:
    """What was read."""
    return (
        f"Tiny teacher, bf16, {report['num_texts']} generated texts of {report['length']} tokens, {report['window']} "
        f"tokens in the cache: {report['length'] / report['window']:.1f} windows. Perplexity of a stretch of one "
        "window with its 95% interval over texts."
    )


def plot(report: Report, path: Path) -> None:
    """Perplexity over the place in the text, in windows, with intervals."""
    with panels(path, 8, 4.5) as (axes,):
        for index, row in enumerate(report["rows"]):
            middles = [(one["begin"] / report["window"]) + 0.5 for one in row["stretches"]]
            low, middle, high = ([one[key] for one in row["stretches"]] for key in ("low", "perplexity", "high"))
            axes.plot(middles, middle, "o-", markersize=3, color=f"C{index}", label=row["name"])
            axes.fill_between(middles, low, high, color=f"C{index}", alpha=0.2, linewidth=0)
        axes.set(xlabel=f"place in the text, windows of {report['window']} tokens", ylabel="perplexity")
        axes.set_yscale("log")


def measure(args: argparse.Namespace) -> Report:
    """Read the texts with every cache."""
    rows: list[Row] = []
    texts: list[list[int]] = []
    for name, policy in rows_of(args.window, args.sinks).items():
        options = BuildOptions(dtype="bfloat16", max_num_seqs=16, kv_policy=policy)
        slug = policy.replace(":", "-").replace(",", "-").replace("=", "")
        engine = cached_engine(args.work / f"streaming-{slug}", TEACHER_DIR, options)
        if not texts:  # a generated text may end early: so longer ones are cut
            made = generated_documents(tokenizer_of(engine), args.num_texts, args.length + 64, 0)
            texts = [text[: args.length] for text in made]
        rows.append({"name": name, "policy": policy, "stretches": stretches(losses(engine, texts, name), args.window)})
    return {"num_texts": len(texts), "rows": rows}


EXPERIMENT = Experiment(
    "perf.eviction.streaming", __doc__,
    options=(
        number("--window", 96, "tokens in the cache (default %(default)s)"),
        number("--sinks", 4, "first tokens that stay (default %(default)s)"),
        number("--length", 1920, "tokens of a text (default %(default)s)"), number("--num-texts", 16), work(),
        output("OUTPUT.json, .md and .png", "streaming-perplexity", as_json=False),
    ),
    measure=measure, settings=("window", "length"), title="Perplexity along a text", notes=notes, columns=columns,
    plot=plot, figure=".png",
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
