"""Every tensor of `preprocessing` and `postprocessing` in the contract, called directly on the running server."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from kvforge import LLM
from kvforge.common.errors import KvforgeError
from kvforge.serving.client import StreamingClient
from kvforge.serving.contract.word_lists import decode_words
from kvforge.serving.server.launcher import TritonServer

CONTRACT = json.loads((Path(__file__).parents[1] / "cpu/serving/contract/triton_contract.json").read_text())["models"]
PLAIN = {"QUERY": "Once", "REQUEST_OUTPUT_LEN": 7}
BIASED = {"EMBEDDING_BIAS_WORDS": ["q", "r"], "EMBEDDING_BIAS_WEIGHTS": [2.5, -1.0]}
IMAGE = np.ones((1, 3, 2, 2))
# Input -> (what to send, the output it fills); None: refused under the ensemble's name.
INPUTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "QUERY": ({}, "INPUT_ID"),
    "REQUEST_OUTPUT_LEN": ({}, "REQUEST_OUTPUT_LEN"),
    "BAD_WORDS_DICT": ({"BAD_WORDS_DICT": ["ab"]}, "BAD_WORDS_IDS"),
    "STOP_WORDS_DICT": ({"STOP_WORDS_DICT": ["ab"]}, "STOP_WORDS_IDS"),
    "EMBEDDING_BIAS_WORDS": (BIASED, "EMBEDDING_BIAS"),
    "EMBEDDING_BIAS_WEIGHTS": (BIASED, "EMBEDDING_BIAS"),
    "END_ID": ({"END_ID": 17}, "OUT_END_ID"),
    "PAD_ID": ({"PAD_ID": 18}, "OUT_PAD_ID"),
    "DECODER_QUERY": ({"DECODER_QUERY": "a"}, None),
    "IMAGE_URL": ({"IMAGE_URL": "a"}, None),
    "IMAGE_BYTES": ({"IMAGE_BYTES": IMAGE}, None),
    "VIDEO_BYTES": ({"VIDEO_BYTES": IMAGE}, None),
    "PROMPT_TABLE_EXTRA_ID": ({"PROMPT_TABLE_EXTRA_ID": 3}, None),
}
REFUSED = {
    "DECODER_QUERY": "decoder_text_input",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
    "IMAGE_URL": "image_url_input",
    "IMAGE_BYTES": "image_bytes_input",
    "VIDEO_BYTES": "video_bytes_input",
}
# Outputs that nothing fills, because what they are made of is refused.
NEVER = {"OUT_PROMPT_TABLE_EXTRA_IDS"}


def call(server: TritonServer, model: str, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    with StreamingClient(server.grpc_url) as client:
        (response,) = client.generate(model, inputs)
    return response.tensors


def expected(llm: LLM) -> dict[str, Any]:
    encode = llm.tokenizer.encode
    words = [encode(text, add_special_tokens=False) for text in ("ab", " ab")]
    bias = np.zeros(llm.engine.config.vocab_size, np.float32)
    for text, weight in (("q", 2.5), ("r", -1.0)):
        for token in encode(text, add_special_tokens=False):
            bias[token] += weight
    return {
        "INPUT_ID": [encode("Once")],
        "REQUEST_INPUT_LEN": [[len(encode("Once"))]],
        "REQUEST_OUTPUT_LEN": [[7]],
        "BAD_WORDS_IDS": words,
        "STOP_WORDS_IDS": words,
        "EMBEDDING_BIAS": [bias.tolist()],
        "OUT_END_ID": [[17]],
        "OUT_PAD_ID": [[18]],
    }


@pytest.mark.parametrize("model", ["preprocessing", "postprocessing"])
def test_names(server: TritonServer, model: str) -> None:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        config = client.get_model_config(model).config
    assert set(CONTRACT[model]["inputs"]) <= {tensor.name for tensor in config.input}
    assert set(CONTRACT[model]["outputs"]) <= {tensor.name for tensor in config.output}


@pytest.mark.parametrize("name", INPUTS)
def test_preprocessing_input(server: TritonServer, llm: LLM, name: str) -> None:
    assert set(CONTRACT["preprocessing"]["inputs"]) <= set(INPUTS)
    inputs, output = INPUTS[name]
    if output is None:
        with pytest.raises(KvforgeError, match=f"'{REFUSED[name]}' cannot be used"):
            call(server, "preprocessing", {**PLAIN, **inputs})
        return
    array = call(server, "preprocessing", {**PLAIN, **inputs})[output]
    found = decode_words(output, array[0]) if output.endswith("WORDS_IDS") else array.tolist()
    assert found == expected(llm)[output]
    if inputs:
        plain = call(server, "preprocessing", PLAIN)[output]
        if output in ("OUT_END_ID", "OUT_PAD_ID"):  # the tokenizer names no token to pad with
            assert plain.tolist() == [[llm.engine.manifest.eos_token_ids[0]]]
        else:
            assert plain.shape[0] == 1 and plain.size == 0


def test_every_preprocessing_output_is_filled_or_known_to_stay_empty(server: TritonServer) -> None:
    everything = {key: value for inputs, output in INPUTS.values() if output for key, value in inputs.items()}
    filled = set(call(server, "preprocessing", {**PLAIN, **everything}))
    assert set(CONTRACT["preprocessing"]["outputs"]) == filled | NEVER


def test_postprocessing_makes_texts_of_rows(server: TritonServer, llm: LLM) -> None:
    ids = llm.tokenizer.encode("two words", add_special_tokens=False)
    tokens = np.array([[*ids, 0], [*ids[:3], *[0] * (len(ids) - 2)]], np.int32)
    texts = call(server, "postprocessing", {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": [len(ids), 3]})["OUTPUT"]
    assert texts.tolist() == [b"two words", llm.tokenizer.decode(ids[:3]).encode()]
