"""A teacher's own answers to instructions: what its SwiftKV students are distilled on.

    python -m perf.real_model.answers ENGINE PROMPTS.jsonl ANSWERS.jsonl [--num-prompts N] [--temperature 0.8]

A line of PROMPTS.jsonl is a conversation (``messages``) that a user's message ends. ANSWERS.jsonl gets the same with
the answer, ANSWERS.txt the conversations as the chat template writes them. A run that was ended goes on where it was:
answers are written together, ``--at-once`` of them.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge import LLM, SamplingParams
from kvforge.common.errors import KvforgeError
from perf.harness.command import make_parser, run_main
from perf.harness.files import append, read_lines
from perf.harness.options import engine_place, number, option, place


def answer_all(llm: LLM, conversations: list[dict[str, Any]], file: Path, at_once: int, params: SamplingParams) -> int:
    """Append what the engine answers to the conversations that ``file`` does not have, the i-th with the seed i;
    returns how many tokens."""
    done = len(read_lines(file))
    total = 0
    with tqdm(initial=done, total=len(conversations), unit="answer") as bar:
        for first in range(done, len(conversations), at_once):
            group = conversations[first : first + at_once]
            each = [replace(params, seed=first + index) for index in range(len(group))]
            outputs = llm.chat([row["messages"] for row in group], each, use_tqdm=False)
            answers = [output.outputs[0] for output in outputs]
            for row, answer in zip(group, answers, strict=True):
                append(file, {"messages": [*row["messages"], {"role": "assistant", "content": answer.text}]})
            total += sum(len(answer.token_ids) for answer in answers)
            bar.update(len(group))
    return total


def conversations_of(prompts: Path, num: int | None) -> list[dict[str, Any]]:
    """Return the first ``num`` conversations of a file, or all. Raises KvforgeError where it cannot be read."""
    try:
        return [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()[:num]]
    except OSError as error:
        told = f"{prompts} cannot be read ({error.strerror}); perf.real_model.texts makes it."
        raise KvforgeError(told) from None


PARSER = make_parser(
    __doc__, engine_place(), place("prompts"), place("answers"),
    number("--num-prompts", None, "the first N (default: all)", metavar="N"),
    number("--max-tokens", 256, "of an answer (default %(default)s)"),
    option("--temperature", type=float, default=0.8, help="0: greedy (default %(default)s)"),
    option("--top-p", type=float, default=0.95, help="(default %(default)s)"),
    number("--at-once", 512, "answers a write", metavar="N"),
    option("--kv-cache-gib", type=float, default=2.0, help="(default %(default)s)"),
)  # fmt: skip


def main() -> int:
    """Write the answers."""
    args = PARSER.parse_args()
    conversations = conversations_of(args.prompts, args.num_prompts)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p)
    llm = LLM(args.engine, kv_cache_gib=args.kv_cache_gib)
    begin = time.perf_counter()
    total = answer_all(llm, conversations, args.answers, args.at_once, params)
    seconds = time.perf_counter() - begin
    rows = read_lines(args.answers)
    texts = [llm.chat_prompt(row["messages"], add_generation_prompt=False).text for row in rows]
    args.answers.with_suffix(".txt").write_text("".join(texts), encoding="utf-8")
    print(f"{total} tokens of answers in {seconds:.0f} s, {total / seconds:.0f} a second")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
