"""Good requests with the answers that they have offline, and the mix of good and broken ones made from them."""

import json
import random
import urllib.request

from kvforge import LLM, SamplingParams
from kvforge.serving.server.launcher import TritonServer
from tests.support.fuzz.cases import Case, Mutator, Tensor

NUM_PROMPTS = 12
GOOD_SHARE = 1 / 3


def tensor(name: str, datatype: str, *values: object) -> Tensor:
    return Tensor(name, datatype, (1, len(values)), values)


class KnownAnswers:
    """Good requests by model; with `stream` where the protocol carries several responses."""

    def __init__(self, llm: LLM) -> None:
        rng = random.Random("known answers")
        letters = "abcdefghijklmnopqrstuvwxyz .,é"
        prompts = ["".join(rng.choice(letters) for _ in range(rng.randrange(3, 40))) for _ in range(NUM_PROMPTS)]
        params = [
            SamplingParams(max_tokens=rng.randrange(1, 13), temperature=0.0)
            if index % 2
            else SamplingParams(max_tokens=rng.randrange(1, 13), temperature=0.8, top_k=9, top_p=1.0, seed=index)
            for index in range(NUM_PROMPTS)
        ]
        self._known = list(zip(params, llm.generate(prompts, params, use_tqdm=False), strict=True))

    def good(self, rng: random.Random, model: str, stream: bool = True) -> Case:
        """A request whose answer is known; those to pre- and postprocessing have none to compare."""
        params, output = rng.choice(self._known)
        ids, text = list(output.prompt_token_ids), str(output.prompt).encode()
        sampling = []
        if params.temperature:
            names = ("runtime_top_k", "runtime_top_p") if model == "tensorrt_llm" else ("top_k", "top_p")
            sampling = [
                tensor("temperature", "FP32", params.temperature), tensor(names[0], "INT32", params.top_k),
                tensor(names[1], "FP32", params.top_p), tensor("seed", "UINT64", params.seed),
            ]  # fmt: skip
        if model == "tensorrt_llm":
            tensors = [
                tensor("input_ids", "INT32", *ids), tensor("input_lengths", "INT32", len(ids)),
                tensor("request_output_len", "INT32", params.max_tokens), tensor("streaming", "BOOL", stream),
            ]  # fmt: skip
            return Case(model, (*tensors, *sampling), expected=tuple(output.outputs[0].token_ids))
        if model == "preprocessing":
            return Case(model, (tensor("QUERY", "BYTES", text), tensor("REQUEST_OUTPUT_LEN", "INT32", 4)))
        if model == "postprocessing":
            tokens = Tensor("TOKENS_BATCH", "INT32", (1, 1, len(ids)), tuple(ids))
            return Case(model, (tokens, tensor("SEQUENCE_LENGTH", "INT32", len(ids))))
        tensors = [tensor("text_input", "BYTES", text), tensor("max_tokens", "INT32", params.max_tokens)]
        if stream:
            tensors.append(tensor("stream", "BOOL", True))
        return Case(model, (*tensors, *sampling), expected=output.outputs[0].text)


def mutator(server: TritonServer, model: str) -> Mutator:
    """Reads the model's inputs from the server."""
    with urllib.request.urlopen(f"{server.http_url}/v2/models/{model}", timeout=120) as response:
        inputs = json.load(response)["inputs"]
    return Mutator(tuple((entry["name"], entry["datatype"], tuple(entry["shape"][1:])) for entry in inputs))


def fuzz_cases(
    server: TritonServer, known: KnownAnswers, model: str, seed: object, number: int, stream: bool = True
) -> list[Case]:
    """`number` requests to `model` from `seed`, a third of them good."""
    print(f"fuzz seed {seed!r}, {number} requests to {model}")
    rng = random.Random(f"{seed}/{model}")
    breaker = mutator(server, model)
    cases = []
    for _ in range(number):
        case = known.good(rng, model, stream)
        cases.append(case if rng.random() < GOOD_SHARE else breaker.broken(rng, case))
    return cases
