"""A server of a model with a blind cut answers as its graphs do in plain torch, alone and at once, and gives all pages
back."""

from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from kvforge.compiler import BuildOptions, build_engine
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.serving.client import StreamingClient
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.models.checkpoints import make_blind, make_checkpoint
from tests.support.serving.server import ENDLESS, ask, started, streamed, used_pages, wait_until
from tests.support.sessions.eager import eager_session

OPTIONS = BuildOptions(page_size=8, max_num_tokens=64, max_num_seqs=8)
PROMPTS = [[3 + (7 * seed + place * place) % 300 for place in range(length)] for seed, length in enumerate((90, 3, 41))]
NUM_TOKENS = 24


def expected(checkpoint: Path) -> list[list[int]]:
    engine = LLMEngine(session=eager_session(checkpoint, OPTIONS), num_pages=64, max_num_seqs=1)
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.add_request(str(index), prompt, params)
    found: list[list[int]] = [[] for _ in PROMPTS]
    while engine.has_unfinished():
        for output in engine.step():
            found[int(output.request_id)] += output.new_token_ids
    return found


def test_requests_at_once_and_again_are_answered_as_in_plain_torch(tmp_path: Path) -> None:
    path = make_blind(make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=4), 2, 16, 2)
    build_engine(path, tmp_path / "engine", OPTIONS)
    wanted = expected(path)
    assert all(len(tokens) == NUM_TOKENS for tokens in wanted)
    with started(TritonServer(tmp_path / "engine", ServerOptions(kv_cache_gib=0.1))) as server:
        for _ in range(2):
            with ThreadPoolExecutor(len(PROMPTS)) as pool, StreamingClient(server.grpc_url) as client:
                cancelled = client.generate("tensorrt_llm", ask("tensorrt_llm", PROMPTS[0] * 2, ENDLESS))
                next(cancelled)
                answers = pool.map(streamed, repeat(server), PROMPTS, repeat(NUM_TOKENS))
                next(cancelled)
                cancelled.close()
                assert list(answers) == wanted
        wait_until(lambda: used_pages(server) == 0, "pages given back")
