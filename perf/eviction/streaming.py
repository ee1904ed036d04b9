"""StreamingLLM's figure (arXiv 2309.17453, figure 3): perplexity along a text of many times the window.

    python -m perf.eviction.streaming --output perf/results/streaming-perplexity

The tiny teacher reads texts token by token, as it would generate them: with the full cache; with the first tokens and
the newest ones, distances being those of places in the cache as in the paper, or those of the text; and with the newest
ones alone. All caches but the full one hold --window tokens. Perplexity is given for stretches of one window each, with
a 95% interval over texts (percentile bootstrap). Writes OUTPUT.json, .md and .png.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kvforge.common.figures import new_figure, save_figure
from kvforge.compiler import BuildOptions
from kvforge.evaluation.documents import generated_documents
from kvforge.runtime import LLMEngine
from perf.harness.command import add_report, add_work, begin_report, make_parser, positive, run_main
from perf.harness.engines import TEACHER_DIR, cached_engine, tokenizer_of
from perf.harness.forced import forced_logits
from perf.harness.tables import markdown_table
from perf.quality.scores import keep_report

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


def markdown(report: dict[str, Any]) -> str:
    """Return the table with its explanation."""
    rows, window = report["rows"], report["window"]
    count = len(rows[0]["stretches"])
    shown = sorted({round(i * (count - 1) / (SHOWN - 1)) for i in range(SHOWN)})
    head = ["cache", *(f"window {index + 1}" for index in shown), "last 5 over windows 2 to 6"]
    table = []
    for row in rows:
        values = [one["perplexity"] for one in row["stretches"]]
        cells = [f"{values[i]:.3f} ({row['stretches'][i]['low']:.3f}–{row['stretches'][i]['high']:.3f})" for i in shown]
        table.append([row["name"], *cells, f"{np.mean(values[-5:]) / np.mean(values[1:6]):.3f}"])
    return (
        "\n".join(
            [
                "# Perplexity along a text",
                "",
                f"Tiny teacher, bf16, {report['num_texts']} generated texts of {report['length']} tokens, {window} "
                f"tokens in the cache: {report['length'] / window:.1f} windows. Perplexity of a stretch of one window "
                f"with its 95% interval over texts. {report['machine']}.",
                "",
                f"`{report['command']}`",
                "",
                markdown_table(head, table),
            ]
        )
        + "\n"
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """Perplexity over the place in the text, in windows, with intervals."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    for index, row in enumerate(report["rows"]):
        middles = [(one["begin"] / report["window"]) + 0.5 for one in row["stretches"]]
        low, middle, high = ([one[key] for one in row["stretches"]] for key in ("low", "perplexity", "high"))
        axes.plot(middles, middle, "o-", markersize=3, color=f"C{index}", label=row["name"])
        axes.fill_between(middles, low, high, color=f"C{index}", alpha=0.2, linewidth=0)
    axes.set(xlabel=f"place in the text, windows of {report['window']} tokens", ylabel="perplexity")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--window", type=positive, default=96, help="tokens in the cache (default %(default)s)")
    parser.add_argument("--sinks", type=positive, default=4, help="first tokens that stay (default %(default)s)")
    parser.add_argument("--length", type=positive, default=1920, help="tokens of a text (default %(default)s)")
    parser.add_argument("--num-texts", type=positive, default=16)
    add_work(parser)
    add_report(parser, "OUTPUT.json, .md and .png", "streaming-perplexity", as_json=False)
    args = parser.parse_args()
    report = begin_report("perf.eviction.streaming")
    rows = []
    texts: list[list[int]] = []
    for name, policy in rows_of(args.window, args.sinks).items():
        options = BuildOptions(dtype="bfloat16", max_num_seqs=16, kv_policy=policy)
        slug = policy.replace(":", "-").replace(",", "-").replace("=", "")
        engine = cached_engine(args.work / f"streaming-{slug}", TEACHER_DIR, options)
        if not texts:
            tokenizer = tokenizer_of(engine)
            # A generated text may end early: so longer ones are cut.
            texts = [
                text[: args.length] for text in generated_documents(tokenizer, args.num_texts, args.length + 64, 0)
            ]
        rows.append({"name": name, "policy": policy, "stretches": stretches(losses(engine, texts, name), args.window)})
    report |= {"window": args.window, "length": args.length, "num_texts": len(texts), "rows": rows}
    text = markdown(report)
    print(text)
    keep_report(args.output, report, text, partial(plot, report))


if __name__ == "__main__":
    sys.exit(run_main(main))
