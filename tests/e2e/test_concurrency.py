"""64 clients at once, each on a connection of its own, get what they would get alone."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvforge import LLM, SamplingParams
from kvforge.serving.client import StreamingClient
from kvforge.serving.server.launcher import TritonServer
from tests.support.serving.server import ask, used_pages, wait_until, without_end

NUM_CLIENTS, REQUESTS_PER_CLIENT, MAX_TOKENS = 64, 2, 16


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
def test_64_streaming_clients_get_the_offline_answers(server: TritonServer, llm: LLM, model: str) -> None:
    rng = random.Random(f"concurrency/{model}")
    prompts = [
        "".join(rng.choice("abcdefghijklmnopqrstuvwxyz .") for _ in range(rng.randrange(5, 60)))
        for _ in range(NUM_CLIENTS * REQUESTS_PER_CLIENT)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    offline = llm.generate(prompts, params, use_tqdm=False)

    def client(index: int) -> list:
        answers = []
        with StreamingClient(server.grpc_url) as connection:
            for output in offline[index::NUM_CLIENTS]:
                prompt = output.prompt_token_ids if model == "tensorrt_llm" else output.prompt
                responses = list(connection.generate(model, ask(model, prompt, MAX_TOKENS)))
                assert [r.final for r in responses] == [False] * (len(responses) - 1) + [True]
                if model == "tensorrt_llm":
                    answers.append([token for r in responses for token in r.token_ids])
                else:
                    answers.append("".join(r.text for r in responses))
        return answers

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = list(pool.map(client, range(NUM_CLIENTS)))
    for index, got in enumerate(answers):
        outputs = [output.outputs[0] for output in offline[index::NUM_CLIENTS]]
        assert got == [without_end(o) if model == "tensorrt_llm" else o.text for o in outputs]
    wait_until(lambda: used_pages(server) == 0, "all pages free")
