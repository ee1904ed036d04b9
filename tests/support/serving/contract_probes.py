"""What each input of the Triton contract must do on a running server: one probe per input.

A probe is a function of a `Probe` that sends requests and asserts; names are those of `tensorrt_llm` and of the
text models (`ensemble`, `tensorrt_llm_bls`). `INPUTS` is the table; a tensor without an entry fails the test that
reads the contract. Outputs are in contract_outputs.py.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvforge import LLM, SamplingParams
from kvforge.common.errors import KvforgeError
from kvforge.runtime import CompletionOutput, RequestOutput
from kvforge.runtime.text.detokenizer import Detokenizer
from kvforge.serving.client import StreamingClient, StreamResponse
from kvforge.serving.contract.inputs import ENSEMBLE_NAMES
from kvforge.serving.contract.word_lists import encode_words
from kvforge.serving.server.launcher import TritonServer
from tests.support.serving.server import ENDLESS, without_end

PROMPT = "What is the capital of France?"
MAX_TOKENS = 12
SAMPLED = {"runtime_top_k": 40, "seed": 3}
SAMPLED_OFFLINE = {"temperature": 1.0, "top_k": 40, "seed": 3}


@dataclass(frozen=True)
class Probe:
    """One model of a running server, and the same engine offline."""

    server: TritonServer
    llm: LLM
    model: str

    @property
    def is_text(self) -> bool:
        return self.model != "tensorrt_llm"

    def responses(self, prompt: str = PROMPT, **inputs: Any) -> list[StreamResponse]:
        """Ask; `inputs` have the names of tensorrt_llm, a value of None leaves one out."""
        with StreamingClient(self.server.grpc_url) as client:
            return list(client.generate(self.model, self._inputs(prompt, inputs)))

    def first_response(self, prompt: str = PROMPT, **inputs: Any) -> StreamResponse:
        """As `responses`, and then the request is given up: of a short one all tokens may come together."""
        with StreamingClient(self.server.grpc_url) as client:
            return next(client.generate(self.model, self._inputs(prompt, inputs)))

    def _inputs(self, prompt: str, inputs: dict[str, Any]) -> dict[str, Any]:
        ids = self.llm.tokenizer.encode(prompt)
        plain: dict[str, Any] = {"request_output_len": MAX_TOKENS, "streaming": False}
        plain |= {"text_input": prompt} if self.is_text else {"input_ids": ids, "input_lengths": len(ids)}
        wanted = {name: value for name, value in (plain | inputs).items() if value is not None}
        if self.is_text:
            wanted = {ENSEMBLE_NAMES.get(name, name): value for name, value in wanted.items()}
        return wanted

    def answers(self, prompt: str = PROMPT, **inputs: Any) -> list[Any]:
        """Text or token ids of each sequence."""
        found: dict[int, Any] = {}
        for response in self.responses(prompt, **inputs):
            index = int(response.tensors["sequence_index"].item())
            piece = response.text if self.is_text else response.token_ids
            found[index] = found[index] + piece if index in found else piece
        return [found[index] for index in sorted(found)]

    def offline(self, prompt: Any = PROMPT, **params: Any) -> list[Any]:
        """What `answers` must be."""
        fields = {"temperature": 0.0, "max_tokens": MAX_TOKENS, **params}
        (output,) = self.llm.generate([prompt], SamplingParams(**fields), use_tqdm=False)
        return [self._text(output, o) if self.is_text else without_end(o) for o in output.outputs]

    def _text(self, output: RequestOutput, completion: CompletionOutput) -> str:
        """Of all tokens but an end token: the server keeps a stop word, as TensorRT-LLM does."""
        detokenizer = Detokenizer(self.llm.tokenizer, output.prompt_token_ids)
        return "".join(map(detokenizer.push, without_end(completion))) + detokenizer.flush()

    def tokens(self) -> list[int]:
        """Token ids of the plain greedy answer."""
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        return list(self.llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)

    def refusal(self, **inputs: Any) -> str:
        with pytest.raises(KvforgeError) as caught:
            self.responses(**inputs)
        return str(caught.value)


Check = Callable[[Probe], None]


def honoured(inputs: dict[str, Any], params: dict[str, Any], plain: dict[str, Any] | None = None) -> Check:
    """The answer equals the offline one with `params`, and differs from the one to `plain`."""

    def check(probe: Probe) -> None:
        answers = probe.answers(**inputs)
        assert answers == probe.offline(**params)
        assert answers != probe.answers(**(plain or {}))

    return check


def refused(name: str, value: Any) -> Check:
    def check(probe: Probe) -> None:
        shown = ENSEMBLE_NAMES.get(name, name) if probe.is_text else name
        assert re.search(rf"'{shown}'.* cannot be used: ", probe.refusal(**{name: value}))

    return check


def without_effect(name: str, value: Any) -> Check:
    """Accepted, and nothing changes: there is one beam and no padding."""
    return lambda probe: _equal(probe.answers(**{name: value}), probe.offline())


def _equal(found: Any, expected: Any) -> None:
    assert found == expected


def _input_lengths(probe: Probe) -> None:
    ids = probe.llm.tokenizer.encode(PROMPT)
    assert probe.answers(input_lengths=len(ids) - 3) == probe.offline(ids[:-3])


def _end_id(probe: Probe) -> None:
    tokens = probe.tokens()
    end = tokens[5]
    expected = probe.offline(ignore_eos=True, stop_token_ids=[end])
    assert probe.answers(end_id=end) == expected
    assert expected != probe.offline()


def _min_tokens(probe: Probe, name: str = "min_tokens") -> None:
    end = probe.tokens()[5]
    expected = probe.offline(ignore_eos=True, stop_token_ids=[end], min_tokens=9)
    assert probe.answers(end_id=end, **{name: 9}) == expected
    assert expected != probe.answers(end_id=end)


def _words(kind: str) -> Check:
    def check(probe: Probe) -> None:
        tokens = probe.tokens()
        words = [tokens[3:5], [tokens[0]]] if kind == "bad" else [tokens[4:6]]
        expected = probe.offline(**{f"{kind}_words_ids": words})
        assert expected != probe.offline()
        if not probe.is_text:
            assert probe.answers(**{f"{kind}_words_list": encode_words(words)}) == expected
            return
        encode = probe.llm.tokenizer.encode
        texts = ["e", "t285"]
        ids = [encode(v, add_special_tokens=False) for t in texts for v in (t, f" {t}")]
        expected = probe.offline(**{f"{kind}_words_ids": ids})
        assert probe.answers(**{f"{kind}_words_list": texts}) == expected

    return check


def _embedding_bias(probe: Probe) -> None:
    bias = np.zeros(probe.llm.engine.config.vocab_size, np.float32)
    bias[[17, 18]] = [100.0, 100.0]
    expected = probe.offline(logit_bias={17: 100.0, 18: 100.0})
    assert probe.answers(embedding_bias=bias) == expected
    assert set(expected[0]) <= {17, 18}
    assert "'embedding_bias'" in probe.refusal(embedding_bias=bias[:-1])
    assert "'embedding_bias'" in probe.refusal(embedding_bias=bias + np.float32("nan"))


def _embedding_bias_words(probe: Probe) -> None:
    ids = probe.llm.tokenizer.encode("q", add_special_tokens=False)
    expected = probe.offline(logit_bias={i: 100.0 for i in ids})
    request = {"embedding_bias_words": ["q"], "embedding_bias_weights": [100.0]}
    assert probe.answers(**request) == expected
    assert expected[0] == "q" * MAX_TOKENS
    assert "'embedding_bias_weights'" in probe.refusal(embedding_bias_words=["q", "r"], embedding_bias_weights=[1.0])
    assert "'embedding_bias_weights'" in probe.refusal(embedding_bias_words=["q"], embedding_bias_weights=[np.inf])


def _drafts(probe: Probe) -> None:
    tokens = probe.tokens()
    (response,) = probe.responses(draft_input_ids=tokens[:4], return_perf_metrics=True)
    assert response.token_ids == tokens
    assert response.tensors["total_draft_tokens"].item() == 4
    assert response.tensors["total_accepted_draft_tokens"].item() == 4
    assert response.tensors["acceptance_rate"].item() == 1.0
    assert "'draft_input_ids'" in probe.refusal(draft_input_ids=[-5])


def _num_return_sequences(probe: Probe) -> None:
    answers = probe.answers(num_return_sequences=3, **SAMPLED)
    assert answers == probe.offline(n=3, **SAMPLED_OFFLINE)
    assert len(answers) == 3


def _streaming(probe: Probe) -> None:
    assert not probe.first_response(streaming=True, request_output_len=ENDLESS, end_id=-1).final
    assert len(probe.responses(streaming=False)) == 1
    assert probe.answers(streaming=True) == probe.offline()


def _exclude_input(probe: Probe) -> None:
    prompt = PROMPT if probe.is_text else probe.llm.tokenizer.encode(PROMPT)
    assert probe.answers(exclude_input_in_output=True) == probe.offline()
    assert probe.answers(exclude_input_in_output=False) == [prompt + probe.offline()[0]]


def _stop(probe: Probe) -> None:
    with StreamingClient(probe.server.grpc_url) as client, StreamingClient(probe.server.grpc_url) as stopper:
        endless = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": ENDLESS, "end_id": -1}
        running = client.generate(probe.model, {**endless, "streaming": True}, request_id="contract")
        next(running)
        stop = {"input_ids": [], "input_lengths": 0, "request_output_len": 0, "stop": True}
        assert list(stopper.generate(probe.model, stop, request_id="contract")) == []
        *_, last = running
        assert last.final and last.tensors["finish_reason"].item() == b"cancelled"


def _perf_metrics(probe: Probe) -> None:
    """With every response of a stream too, in numbers that only grow."""
    _returns("return_perf_metrics", *PERF_METRICS)(probe)
    streamed = probe.responses(return_perf_metrics=True, streaming=True)
    assert all(set(PERF_METRICS) <= set(response.tensors) for response in streamed)
    for name in ("kv_cache_alloc_total_blocks", "last_token_time_ns"):
        values = [response.tensors[name].item() for response in streamed]
        assert values == sorted(values) and values[0] > 0


def _returns(flag: str, *outputs: str) -> Check:
    """The outputs come with the flag and not without it."""

    def check(probe: Probe) -> None:
        (with_flag,), (without,) = probe.responses(**{flag: True}), probe.responses(**{flag: False})
        assert set(outputs) <= set(with_flag.tensors)
        assert not set(outputs) & set(without.tensors)

    return check


def _retention(name: str, bad: int, words: str) -> Check:
    ranges = {
        "retention_token_range_starts": [0],
        "retention_token_range_ends": [16],
        "retention_token_range_priorities": [80],
    }

    def check(probe: Probe) -> None:
        assert probe.answers(**ranges) == probe.offline()
        message = probe.refusal(**{**ranges, name: [bad]})
        assert "retention_token_range" in message and words in message
        assert f"'{name}'" in probe.refusal(**{**ranges, name: None})

    return check


def _guide(probe: Probe) -> None:
    request = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{3}[a-f]{2}"}
    params = {"guided_decoding": {"kind": "regex", "guide": request["guided_decoding_guide"]}}
    answers = probe.answers(**request)
    assert answers == probe.offline(**params)
    text = answers[0] if probe.is_text else probe.llm.tokenizer.decode(answers[0])
    assert re.fullmatch("[0-9]{3}[a-f]{2}", text)
    assert "guided_decoding_guide" in probe.refusal(guided_decoding_guide_type="regexp", guided_decoding_guide="a")
    assert "'guided_decoding_guide_type'" in probe.refusal(guided_decoding_guide="a")


def _max_tokens(probe: Probe) -> None:
    assert probe.answers(request_output_len=3) == probe.offline(max_tokens=3)
    assert "'request_output_len' ('max_tokens' of ensemble) is 0" in probe.refusal(request_output_len=0)


def _prompt(probe: Probe) -> None:
    assert probe.answers("Another prompt") == probe.offline("Another prompt")


def _sampled(name: str, value: Any, field: str) -> Check:
    inputs, params = {**SAMPLED, name: value}, {**SAMPLED_OFFLINE, field: value}
    return honoured(inputs, params, SAMPLED)


def _random_seed(probe: Probe) -> None:
    """An earlier release's name: not beside today's."""
    unseeded = {name: value for name, value in SAMPLED.items() if name != "seed"}
    honoured({**unseeded, "random_seed": 2**63 + 5}, {**SAMPLED_OFFLINE, "seed": 2**63 + 5}, unseeded)(probe)
    assert "'random_seed' and 'seed' are the same" in probe.refusal(seed=3, random_seed=3)


TOP_P = {"runtime_top_p": 0.9, "seed": 3}
TOP_P_OFFLINE = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
DECAY, DECAY_OFFLINE = {**TOP_P, "runtime_top_p_decay": 0.2}, {**TOP_P_OFFLINE, "top_p_decay": 0.2}


def _reset_id(probe: Probe) -> None:
    first = SamplingParams(**DECAY_OFFLINE, max_tokens=MAX_TOKENS)
    token = probe.llm.generate([PROMPT], first, use_tqdm=False)[0].outputs[0].token_ids[1]
    assert probe.answers(**DECAY, runtime_top_p_reset_ids=token) == probe.offline(**DECAY_OFFLINE, top_p_reset_id=token)
    assert "'runtime_top_p_reset_ids'" in probe.refusal(**DECAY, runtime_top_p_reset_ids=-2)


PERF_METRICS = (
    "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks", "arrival_time_ns",
    "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns", "acceptance_rate",
    "total_accepted_draft_tokens", "total_draft_tokens",
)  # fmt: skip
MATRIX = np.ones((2, 2), np.float16)

# Inputs that tensorrt_llm and the text models have under the same name, or under one of ENSEMBLE_NAMES.
COMMON: dict[str, Check] = {
    "request_output_len": _max_tokens,
    "num_return_sequences": _num_return_sequences,
    "end_id": _end_id,
    "pad_id": without_effect("pad_id", 5),
    "stop_words_list": _words("stop"),
    "bad_words_list": _words("bad"),
    "beam_width": refused("beam_width", 2),
    "temperature": _sampled("temperature", 0.3, "temperature"),
    "runtime_top_k": honoured({"runtime_top_k": 40, "seed": 3}, SAMPLED_OFFLINE),
    "runtime_top_p": honoured(TOP_P, TOP_P_OFFLINE),
    "len_penalty": without_effect("len_penalty", 2.0),
    "repetition_penalty": honoured({"repetition_penalty": 1.7}, {"repetition_penalty": float(np.float32(1.7))}),
    "min_tokens": _min_tokens,
    "presence_penalty": honoured({"presence_penalty": 3.5}, {"presence_penalty": 3.5}),
    "frequency_penalty": honoured({"frequency_penalty": 3.5}, {"frequency_penalty": 3.5}),
    "seed": _sampled("seed", 2**63 + 5, "seed"),
    "random_seed": _random_seed,
    "min_length": partial(_min_tokens, name="min_length"),
    "return_log_probs": _returns("return_log_probs", "cum_log_probs", "output_log_probs"),
    "return_context_logits": refused("return_context_logits", True),
    "return_generation_logits": _returns("return_generation_logits", "generation_logits"),
    "return_perf_metrics": _perf_metrics,
    "return_num_input_tokens": _returns("return_num_input_tokens", "num_input_tokens"),
    "return_num_output_tokens": _returns("return_num_output_tokens", "num_output_tokens"),
    "exclude_input_in_output": _exclude_input,
    "streaming": _streaming,
    "prompt_embedding_table": refused("prompt_embedding_table", MATRIX),
    "prompt_vocab_size": refused("prompt_vocab_size", 8),
    "lora_task_id": refused("lora_task_id", 1),
    "lora_weights": refused("lora_weights", MATRIX),
    "lora_config": refused("lora_config", np.ones((1, 3), np.int32)),
    "guided_decoding_guide_type": _guide,
    "guided_decoding_guide": _guide,
}
TEXT: dict[str, Check] = {
    **{ENSEMBLE_NAMES.get(name, name): check for name, check in COMMON.items()},
    "text_input": _prompt,
    "decoder_text_input": refused("decoder_text_input", "a"),
    "prompt_table_extra_id": refused("prompt_table_extra_id", 7),
    "embedding_bias_words": _embedding_bias_words,
    "embedding_bias_weights": _embedding_bias_words,
}
IMAGE = np.ones((1, 3, 2, 2))
INPUTS: dict[str, dict[str, Check]] = {
    "tensorrt_llm": {
        **COMMON,
        "input_ids": _prompt,
        "input_lengths": _input_lengths,
        "draft_input_ids": _drafts,
        "decoder_input_ids": refused("decoder_input_ids", [1, 1]),
        "decoder_input_lengths": refused("decoder_input_lengths", 2),
        "draft_logits": refused("draft_logits", np.ones((1, 4), np.float32)),
        "draft_acceptance_threshold": refused("draft_acceptance_threshold", 0.5),
        "embedding_bias": _embedding_bias,
        "runtime_top_p_min": honoured(
            {**DECAY, "runtime_top_p_min": 0.75}, {**DECAY_OFFLINE, "top_p_min": 0.75}, DECAY
        ),
        "runtime_top_p_decay": honoured(DECAY, {**DECAY_OFFLINE, "top_p_decay": float(np.float32(0.2))}, TOP_P),
        "runtime_top_p_reset_ids": _reset_id,
        "early_stopping": without_effect("early_stopping", True),
        "beam_search_diversity_rate": without_effect("beam_search_diversity_rate", 0.5),
        "stop": _stop,
        "prompt_table_extra_ids": refused("prompt_table_extra_ids", [3, 4]),
        "retention_token_range_starts": _retention("retention_token_range_starts", -3, "-3"),
        "retention_token_range_ends": _retention("retention_token_range_ends", -7, "-7"),
        "retention_token_range_priorities": _retention("retention_token_range_priorities", 101, "101"),
        "retention_token_range_durations_ms": refused("retention_token_range_durations_ms", [3, 4]),
        "retention_decode_priority": refused("retention_decode_priority", 3),
        "retention_decode_duration_ms": refused("retention_decode_duration_ms", 3),
        "encoder_input_features": refused("encoder_input_features", MATRIX),
        "encoder_output_lengths": refused("encoder_output_lengths", 2),
        "cross_attention_mask": refused("cross_attention_mask", np.ones((2, 2), bool)),
        "skip_cross_attn_blocks": refused("skip_cross_attn_blocks", True),
        "mrope_rotary_cos_sin": refused("mrope_rotary_cos_sin", [0.5]),
        "mrope_position_deltas": refused("mrope_position_deltas", 1),
        "context_phase_params": refused("context_phase_params", [1, 2]),
        "lookahead_window_size": refused("lookahead_window_size", 4),
        "lookahead_ngram_size": refused("lookahead_ngram_size", 4),
        "lookahead_verification_set_size": refused("lookahead_verification_set_size", 4),
    },
    "ensemble": TEXT,
    "tensorrt_llm_bls": {
        **TEXT,
        "num_draft_tokens": refused("num_draft_tokens", 4),
        "use_draft_logits": refused("use_draft_logits", True),
        "image_input": refused("image_input", IMAGE),
        "image_bytes_input": refused("image_bytes_input", IMAGE),
        "image_url_input": refused("image_url_input", "a"),
        "video_bytes_input": refused("video_bytes_input", IMAGE),
    },
}
