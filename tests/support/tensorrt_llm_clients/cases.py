"""Which of TensorRT-LLM's scripts are run with which flags against which server, and what they must print."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CLIENTS, TOOLS, CI = "inflight_batcher_llm/client", "tools/inflight_batcher_llm", "ci/L0_backend_trtllm"
TEXT_CLIENT = f"{CLIENTS}/end_to_end_grpc_client.py"
TOKEN_CLIENT = f"{CLIENTS}/inflight_batcher_llm_client.py"
DRAFT_CLIENT = f"{CLIENTS}/e2e_grpc_speculative_decoding_client.py"
DRAFT_TEST = f"{TOOLS}/speculative_decoding_test.py"
CORE, TEXTS, QUEUE = (
    f"{TOOLS}/{name}.py" for name in ("benchmark_core_model", "end_to_end_test", "test_max_queue_size")
)
METRICS = f"{CI}/custom_metrics_verification_tests.py"
BASE_METRICS = f"{CI}/base_metrics_verification_tests.py"
ONE, MANY, FULL_ONE, FULL_MANY = "one response", "decoupled", "one response, full queue", "decoupled, full queue"
"""Servers: --no-decoupled; the default; both where one sequence runs and one waits."""
FAILURES = re.compile(r"Received an error|Encountered error|Traceback|FAIL|Failed receiving|failed:")
AT_EXIT = re.compile(r"Exception ignored in: <function InferenceServerClient.__del__.*", re.DOTALL)
"""tritonclient says so after a script's end, with some versions of grpcio."""


@dataclass(frozen=True)
class Case:
    """One run. `shows` is in the output of a run that is right; with `refused` it is the name of what is refused.
    `differs` says why a check of the script fails here."""

    script: str
    server: str
    flags: tuple[str, ...]
    shows: str = ""
    refused: bool = False
    differs: str = ""

    def problem(self, status: int, output: str) -> str:
        """What is wrong with a run, or nothing."""
        if self.shows not in output:
            return f"does not say {self.shows!r}"
        if self.refused:
            return ""
        if self.differs:
            return "" if status else "the check that differs passes"
        output = AT_EXIT.sub("", output)
        found = FAILURES.search(output)
        if found:
            return output[found.start() :].splitlines()[0]
        return f"exit status {status}" if status else ""


@dataclass(frozen=True)
class Known:
    """What cases refer to: prompts, the texts and tokens that kvforge.LLM gives for them offline, and files."""

    tokenizer: Path
    dataset: Path
    work: Path
    prompt: str
    text: str
    "The answer of NUM_TOKENS tokens."
    prompts: tuple[str, str]
    texts: tuple[str, str]
    grpc_url: str
    http_url: str


NUM_TOKENS = 10


def all_cases(known: Known) -> Iterator[Case]:
    """Every script of client/, tools/ and the CI, by server."""
    yield from _texts(known)
    yield from _tokens(known)
    yield from _drafts(known)
    yield from _benchmarks(known)
    for server, protocol, url in ((FULL_ONE, "http", known.http_url), (FULL_MANY, "grpc", known.grpc_url)):
        yield Case(QUEUE, server, ("-p", protocol, "-u", url, "--num-requests", "20", "--request-output-len", "200",
                                 "--tokenizer-dir", str(known.tokenizer)))  # fmt: skip


def _texts(known: Known) -> Iterator[Case]:
    asked = ("-u", known.grpc_url, "-p", known.prompt, "-o", str(NUM_TOKENS))
    for server, stream in ((ONE, ()), (MANY, ()), (MANY, ("--streaming",))):
        for model in ("ensemble", "tensorrt_llm_bls"):
            base = (*asked, "--model-name", model, *stream)
            yield Case(TEXT_CLIENT, server, (*base, "--check-outputs", "--expected-outputs", json.dumps([known.text])))
            yield Case(TEXT_CLIENT, server, (*base, "--exclude-input-in-output"), known.text)
            yield Case(TEXT_CLIENT, server, (*base, "-v", "--return-log-probs"), "output_log_probs.shape")
            yield Case(TEXT_CLIENT, server, (*base, "-v", "--return-generation-logits"), "generation_logits.shape")
            yield Case(TEXT_CLIENT, server, (*base, "-v", "--return-perf-metrics"), "kv_cache_alloc_new_blocks")
            yield Case(TEXT_CLIENT, server, (*base, "--overwrite-output-text"))
            for flags in (
                ("--stop-words", " the", " is"),
                ("--bad-words", " the", " is"),
                ("--embedding-bias-words", " the", " is", "--embedding-bias-weights", "-5", "1"),
                ("--temperature", "0.7", "--repetition-penalty", "1.1", "--presence-penalty", "0.1"),
                ("--frequency-penalty", "0.1", "--request-id", "7"),
                ("--end-id", "5", "--pad-id", "0"),
            ):
                yield Case(TEXT_CLIENT, server, (*base, *flags))
            guided = (*base, "--exclude-input-in-output", "--guided-decoding-guide-type", "regex")
            yield Case(TEXT_CLIENT, server, (*guided, "--guided-decoding-guide", "[0-9]{3}"))
            refused = {"--beam-width": ("2", "beam_width"), "--return-context-logits": ("", "return_context_logits")}
            for flag, (value, name) in refused.items():
                yield Case(TEXT_CLIENT, server, (*base, flag, *filter(None, [value])), name, refused=True)
            lora = ("--lora-path", str(known.work), "--lora-task-id", "1")
            yield Case(TEXT_CLIENT, server, (*base, *lora), "lora_", refused=True)
    several = ("-u", known.grpc_url, "-p", json.dumps(known.prompts), "-o", str(NUM_TOKENS))
    check = ("--check-outputs", "--expected-outputs", json.dumps(known.texts))
    for stream in ((), ("--streaming",)):
        for batch in ((), ("--batch-inputs",)):
            yield Case(TEXT_CLIENT, MANY, (*several, *stream, *batch, *check))
        yield Case(TEXT_CLIENT, MANY, (*asked, *stream, "-v", "--num-return-sequences", "3"))
    yield Case(TEXT_CLIENT, ONE, (*several, *check))


def _tokens(known: Known) -> Iterator[Case]:
    length = ("--request-output-len", str(NUM_TOKENS))
    files = ("--input-tokens-csv", str(known.work / "input.csv"), "-c", "--output-tokens-csv")
    text = ("--tokenizer-dir", str(known.tokenizer), "--text", known.prompt)
    for server, stream in ((ONE, ()), (MANY, ("--streaming",))):
        base = ("-u", known.grpc_url, *stream)
        yield Case(TOKEN_CLIENT, server, (*base, *text, *length), known.text)
        yield Case(TOKEN_CLIENT, server, (*base, *files, str(known.work / "output.csv"), *length), "PASS!")
        yield Case(TOKEN_CLIENT, server, (*base, *text, *length, "--exclude-input-in-output"), known.text)
        drafts = ("--draft-tokens-csv", str(known.work / "draft.csv"))
        yield Case(TOKEN_CLIENT, server, (*base, *files, str(known.work / "output.csv"), *length, *drafts), "PASS!")
        returned = ("--return-log-probs", "--return-generation-logits", "--return-perf-metrics")
        yield Case(TOKEN_CLIENT, server, (*base, *text, *length, *returned), "generation_logits.shape")
        yield Case(TOKEN_CLIENT, server, (*base, *text, *length, *returned), "kv_cache_alloc_new_blocks")
        requested = ("--requested-outputs", "output_ids", "sequence_length", "sequence_index")
        yield Case(TOKEN_CLIENT, server, (*base, *text, *length, *requested), known.text)
        yield Case(TOKEN_CLIENT, server, (*base, *text, *length, "--top-k", "5", "--top-p", "0.9"))
        penalties = ("--temperature", "0.7", "--repetition-penalty", "1.1", "--presence-penalty", "0.1",
                     "--frequency-penalty", "0.1", "--end-id", "5", "--pad-id", "0")  # fmt: skip
        yield Case(TOKEN_CLIENT, server, (*base, *text, *length, *penalties))
        for cancel in ((), ("--stop-via-request-cancel",)):
            stopped = ("--request-output-len", "900", "--stop-after-ms", "100", "--request-id", "7", *cancel)
            yield Case(TOKEN_CLIENT, server, (*base, *text, *stopped), "cancel" if cancel else "Output sequence")
        for flags, name in (
            (("--beam-width", "2"), "beam_width"),
            (("--return-context-logits",), "return_context_logits"),
            (("--lora-path", str(known.work), "--lora-task-id", "1"), "lora_"),
            (("--prompt-embedding-table-path", str(known.work / "table.npy")), "prompt_embedding_table"),
            (("--lookahead_config", "[4,4,4]"), "lookahead_"),
        ):
            yield Case(TOKEN_CLIENT, server, (*base, *text, *length, *flags), name, refused=True)
    yield Case(
        TOKEN_CLIENT, MANY, ("-u", known.grpc_url, *text, *length, "--num-return-sequences", "3", "--top-k", "5")
    )
    yield Case(TOKEN_CLIENT, MANY, ("-u", known.grpc_url, *text, *length, "--streaming", "--stream-timeout", "30"))


def _drafts(known: Known) -> Iterator[Case]:
    """A draft model and a target model on one server, driven from the client."""
    base = ("--url-target", known.grpc_url, "--url-draft", known.grpc_url)
    logits = ("--return-draft-model-draft-logits", "--return-target-model-accepted-token-logits")
    for flags in ((), logits):
        yield Case(DRAFT_CLIENT, ONE, (*base, "-p", known.prompt, "-o", str(NUM_TOKENS), "-v", *flags), known.text)
    test = (*base, "--url-control", known.grpc_url, "--max-input-len", "500", "--dataset", str(known.dataset))
    yield Case(DRAFT_TEST, ONE, test, "failed/total: 0/")
    yield Case(DRAFT_TEST, ONE, (*test, *logits), "failed/total: 0/")
    yield Case(DRAFT_TEST, ONE, (*test, "--num-draft-tokens", "3", "--stop-words", " the"))
    bls = (*test, "--execute-bls-speculative-decoding", "--return-generation-logits", "--return-perf-metrics")
    yield Case(DRAFT_TEST, ONE, bls, "num_draft_tokens", refused=True)


def _benchmarks(known: Known) -> Iterator[Case]:
    data = ("dataset", "--dataset", str(known.dataset), "--tokenizer-dir", str(known.tokenizer))
    drawn = ("token-norm-dist", "--input-mean", "20", "--input-stdev", "2", "--output-mean", "5", "--output-stdev", "1")
    for protocol, url in (("http", known.http_url), ("grpc", known.grpc_url)):
        base = ("-i", protocol, "-u", url, "--max-input-len", "500")
        yield Case(CORE, ONE, (*base, *data), "Total Latency")
        yield Case(CORE, ONE, (*base, "--num-requests", "20", *drawn), "Total Latency")
        yield Case(CORE, ONE, (*base, "--num-requests", "20", "token-from-histogram", "--histogram-key", "example"),
                   "Total Latency")  # fmt: skip
        yield Case(CORE, ONE, (*base, "--exclude-input-in-output", "--concurrency", "8", *data), "Total Latency")
        paced = ("--request-rate", "50", "--time-delay-dist", "exponential_dist")
        yield Case(CORE, ONE, (*base, *paced, "--num-requests", "20", *drawn), "Total Latency")
        yield Case(TEXTS, ONE, (*base, "--dataset", str(known.dataset)), "Total Latency")
        for flags in (("--test-bls",), ("--test-bls", "--return-log-probs"), ("--return-log-probs",)):
            yield Case(TEXTS, ONE, (*base, *flags, "--dataset", str(known.dataset)), "Functionality test succeed")
        context = (*base, "--return-context-logits", "--dataset", str(known.dataset))
        yield Case(TEXTS, ONE, context, "return_context_logits", refused=True)
    base = ("-i", "grpc", "-u", known.grpc_url, "--max-input-len", "500")
    traced = ("--dump-perfetto-trace", "--op-stats-csv", str(known.work / "stats.csv"))
    yield Case(CORE, ONE, (*base, *traced, *data), "Total Latency")
    yield Case(CORE, MANY, (*base, "--decoupled", *data), "Total Latency")
    yield Case(CORE, MANY, (*base, "--decoupled", "--stream-timeout", "60", "--num-requests", "20", *drawn),
               "Total Latency")  # fmt: skip
