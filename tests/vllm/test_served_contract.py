"""Triton's contract on an engine of target ``vllm``: the tests of tests/e2e, with what vLLM has not refused by name."""

from typing import Any

import pytest

from kvforge import LLM
from kvforge.serving.contract.inputs import ENSEMBLE_NAMES
from kvforge.serving.server.launcher import TritonServer
from tests.e2e.test_cancellation import (  # noqa: F401 - collected here, with this folder's fixtures
    freed,
    no_pages_before,
    test_client_cancels,
    test_client_is_killed,
    test_generate_stream_disconnects,
    test_stop_with_the_same_id,
)
from tests.e2e.test_concurrency import test_64_streaming_clients_get_the_offline_answers  # noqa: F401
from tests.e2e.test_contract_tensors import (  # noqa: F401
    cases,
    test_metrics_are_those_of_the_contract,
    test_names_datatypes_and_dims,
)
from tests.e2e.test_engine_ends import test_engine_killed  # noqa: F401
from tests.e2e.test_generation import (  # noqa: F401
    offline,
    test_a_batch_of_two_prompts,
    test_a_stream_begins_before_its_end,
    test_end_id_stop_and_bad_words,
    test_generate_over_http,
    test_generate_stream_begins_before_its_end,
    test_generate_stream_over_http,
    test_log_probs,
    test_seeded_sampling_and_penalties,
    test_several_sequences,
    test_tensorrt_llm_streams_new_tokens,
    test_tensorrt_llm_whole_answer,
    test_text_models_stream_text,
)
from tests.support.serving.contract_outputs import REFUSED_OUTPUTS, assert_output_comes
from tests.support.serving.contract_probes import INPUTS, SAMPLED, SAMPLED_OFFLINE, Check, Probe, honoured

SEED = 2**63
"""Its text is another than that of ``SAMPLED``. The first bytes that most seeds draw are no UTF-8, and the tokenizer
then makes replacement characters of all bytes of a run: such texts are alike where their tokens are not."""
RETENTION = {
    "retention_token_range_starts": [0],
    "retention_token_range_ends": [16],
    "retention_token_range_priorities": [80],
}


def not_offered(name: str, **inputs: Any) -> Check:
    """Refused by the tensor's name, or the first one's where several make a parameter."""

    def check(probe: Probe) -> None:
        message = probe.refusal(**inputs)
        assert f"'{name}'" in message and "is not offered by an engine of target vllm" in message

    return check


COMMON = {
    "presence_penalty": honoured({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    "frequency_penalty": honoured({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    "seed": honoured({**SAMPLED, "seed": SEED}, {**SAMPLED_OFFLINE, "seed": SEED}, SAMPLED),
    "return_generation_logits": not_offered("return_generation_logits", return_generation_logits=True),
}
OF_TENSORS = {
    "draft_input_ids": not_offered("draft_input_ids", draft_input_ids=[5, 6]),
    "runtime_top_p_decay": not_offered("runtime_top_p_decay", runtime_top_p=0.9, runtime_top_p_decay=0.2),
    "runtime_top_p_min": not_offered("runtime_top_p_min", runtime_top_p=0.9, runtime_top_p_min=0.75),
    "runtime_top_p_reset_ids": not_offered("runtime_top_p_reset_ids", runtime_top_p=0.9, runtime_top_p_reset_ids=5),
    **{name: not_offered("retention_token_range_starts", **RETENTION) for name in RETENTION},
}


def probe_of(model: str, name: str) -> Check:
    if model == "tensorrt_llm":
        return {**INPUTS[model], **COMMON, **OF_TENSORS}[name]
    return {**INPUTS[model], **{ENSEMBLE_NAMES.get(key, key): check for key, check in COMMON.items()}}[name]


@pytest.mark.parametrize(("model", "name"), cases("inputs"))
def test_input_is_honoured_or_refused_by_name(server: TritonServer, llm: LLM, model: str, name: str) -> None:
    probe_of(model, name)(Probe(server, llm, model))


@pytest.mark.parametrize(("model", "name"), cases("outputs"))
def test_output_comes_when_asked_for(server: TritonServer, llm: LLM, model: str, name: str) -> None:
    probe = Probe(server, llm, model)
    if name in REFUSED_OUTPUTS or name == "generation_logits":
        assert name not in probe.responses()[0].tensors
        return
    assert_output_comes(probe, name)
