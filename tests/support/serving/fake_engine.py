"""An engine process whose engine computes nothing: stub, Triton, gateway and `kvforge serve` are tested with it.

All but the engine is that of `kvforge.serving.engine.process`, whose arguments it takes. It is ready within a fraction
of a second, because it imports no torch. The next token is a fixed function of the tokens so far and of the engine's
manifest, so that answers can be told apart and compared; a page is 16 tokens. SIGUSR1 puts the main thread, the one
that steps, into a loop; SIGUSR2 into a native call that holds the interpreter's lock.
"""

import argparse
import ctypes
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.manifest import MANIFEST_FILE, load_manifest
from kvforge.runtime.requests.outputs import SequenceOutput, TokenLogprobs
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.sequence import FinishReason
from kvforge.runtime.step.work import Work, WorkListener
from kvforge.serving.engine import allowance, process

PAGE_SIZE, NUM_PAGES = 16, 4096
VOCAB_SIZE, MAX_SEQ_LEN = 300, 512
"""Of an engine without a manifest."""
POISON, PANIC = -7, -8
"""First tokens that make `add_request` fail in ways it never should: with an Exception, and with what is none."""
SPIN, HOLD = -9, -10
"""First tokens whose second step never ends: a loop in Python, and a native call that holds the interpreter's lock."""


class PanicException(BaseException):
    """Like that of a native library."""


def next_token(last: int, length: int, seed: int, vocab_size: int) -> int:
    """The token after `length` of which this is the last one."""
    return (7 * last + 3 * length + 11 + seed) % vocab_size


def seed_of(engine_dir: Path) -> int:
    """What tells the answers of engines with different manifests apart."""
    return int(load_manifest(engine_dir).sha256[:8], 16)


@dataclass
class _Sequence:
    tokens: list[int]
    params: SamplingParams
    num_generated: int = 0
    pages: int = field(init=False, default=0)


class FakeEngine:
    """The methods of `kvforge.runtime.LLMEngine` that the engine process calls. A step takes `step_s` seconds."""

    def __init__(self, vocab_size: int, step_s: float, max_seq_len: int = MAX_SEQ_LEN, seed: int = 0) -> None:
        self.vocab_size, self.step_s, self.max_seq_len, self.seed = vocab_size, step_s, max_seq_len, seed
        self.sequences: dict[str, _Sequence] = {}
        self.iteration = 0
        self.listener: WorkListener = lambda work: None

    @classmethod
    def of(cls, engine_dir: Path, step_s: float, max_seq_len: int | None = None) -> "FakeEngine":
        """One that takes the place of the engine in this directory, or of none in particular."""
        if not (engine_dir / MANIFEST_FILE).is_file():
            return cls(VOCAB_SIZE, step_s, max_seq_len or MAX_SEQ_LEN)
        manifest = load_manifest(engine_dir)
        return cls(manifest.vocab_size, step_s, max_seq_len or manifest.max_seq_len, seed_of(engine_dir))

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, guide: object = None
    ) -> None:
        if len(prompt_token_ids) >= self.max_seq_len:
            raise RequestError(
                f"the prompt has {len(prompt_token_ids)} tokens, the engine takes {self.max_seq_len - 1}"
            )
        if params.n > 1 or params.guided_decoding is not None:
            raise RequestError("the fake engine gives one sequence, and knows no guides")
        if prompt_token_ids[0] == POISON:
            raise ValueError("poison")
        if prompt_token_ids[0] == PANIC:
            raise PanicException("a pattern took too long")
        self.sequences[request_id] = _Sequence(list(prompt_token_ids), params)

    def abort(self, request_id: str) -> bool:
        return self.sequences.pop(request_id, None) is not None

    def watch(self, listener: WorkListener) -> None:
        self.listener = listener

    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    def step(self) -> list[SequenceOutput]:
        self.listener(Work("decode", len(self.sequences)))
        self._be_odd()
        time.sleep(self.step_s)
        self.iteration += 1
        outputs = []
        for request_id, sequence in list(self.sequences.items()):
            token = next_token(sequence.tokens[-1], len(sequence.tokens), self.seed, self.vocab_size)
            sequence.tokens.append(token)
            sequence.num_generated += 1
            finished = sequence.num_generated == sequence.params.max_tokens or len(sequence.tokens) >= self.max_seq_len
            if finished:
                del self.sequences[request_id]
            logprobs = None if sequence.params.logprobs is None else [TokenLogprobs(token, -1.0, 1, {})]
            reason: FinishReason | None = "length" if finished else None
            outputs.append(SequenceOutput(request_id, 0, [token], logprobs, finished, reason))
        return outputs

    def _be_odd(self) -> None:
        """What a request whose first token says so does to its step."""
        for sequence in self.sequences.values():
            if sequence.tokens[0] == SPIN and sequence.num_generated:
                _spin()
            if sequence.tokens[0] == HOLD and sequence.num_generated:
                _hold()

    def stats(self) -> dict:
        used = sum(-(-len(s.tokens) // PAGE_SIZE) for s in self.sequences.values())
        return {
            "num_waiting": 0,
            "num_paused": 0,
            "num_running": len(self.sequences),
            "max_num_seqs": 64,
            "num_pages": NUM_PAGES,
            "num_used_pages": used,
            "num_free_pages": NUM_PAGES - used,
            "page_size": PAGE_SIZE,
            "page_bytes": 4096,
            "num_iterations": self.iteration,
            "num_reused_tokens": 0,
            "num_prefilling": 0,
            "num_decoding": len(self.sequences),
            "num_context_tokens": 0,
            "num_generated_tokens": self.iteration,
            "num_preemptions": 0,
            "num_failed_steps": 0,
            "num_drafts": 2,
            "num_draft_tokens": 6,
            "num_accepted_draft_tokens": 3,
            "num_early_exits": 5,
            "num_prompt_early_exits": 2,
            "num_selected_chunks": 40,
            "num_reused_chunks": 30,
            "kv_device_bytes": 4096 * NUM_PAGES,
            "kv_device_used_bytes": 4096 * used,
            "kv_host_bytes": 700,
            "kv_host_used_bytes": 70,
            "histograms": {},
        }


def _spin(*_: object) -> None:
    while True:
        pass


def _hold(*_: object) -> None:
    ctypes.PyDLL(None).sleep(3600)  # does not let go of the interpreter's lock


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--floor-s", type=float, default=allowance.FLOOR_S)
    parser.add_argument("--gate", type=Path, help="while there is a file of this name, the engine loads")
    own, arguments = parser.parse_known_args()
    allowance.FLOOR_S = own.floor_s

    def load(engine_dir: str, max_seq_len: int | None = None, **others: Any) -> FakeEngine:
        while own.gate is not None and own.gate.exists():
            time.sleep(0.02)
        return FakeEngine.of(Path(engine_dir), own.step_s, max_seq_len)

    process._load_own = load
    signal.signal(signal.SIGUSR1, _spin)
    signal.signal(signal.SIGUSR2, _hold)
    return process.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
