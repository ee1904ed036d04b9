"""An engine process whose engine computes nothing: the protocol, the stub and Triton are tested with it.

The next token is a fixed function of the tokens so far; a page is 16 tokens. Run as a script with --socket-fd.
"""

import argparse
import ctypes
import socket
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

from kvforge.common.errors import RequestError
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.step.work import Work, WorkListener
from kvforge.serving.engine.allowance import Pulse
from kvforge.serving.engine.heartbeat import Heartbeat
from kvforge.serving.engine.process import EngineServer
from kvforge.serving.processes.watchdog import exit_with_parent

PAGE_SIZE, NUM_PAGES, MAX_SEQ_LEN = 16, 4096, 512
POISON, PANIC = -7, -8
"""First tokens that make `add_request` fail in ways it never should: with an Exception, and with what is none."""
SPIN, HOLD = -9, -10
"""First tokens whose second step never ends: a loop in Python, and a native call that holds the interpreter's lock."""


class PanicException(BaseException):
    """Like that of a native library."""


def next_token(tokens: list[int], vocab_size: int) -> int:
    return (7 * tokens[-1] + 3 * len(tokens) + 11) % vocab_size


@dataclass
class _Sequence:
    tokens: list[int]
    params: SamplingParams
    num_generated: int = 0
    pages: int = field(init=False, default=0)


class FakeEngine:
    def __init__(self, vocab_size: int, step_s: float) -> None:
        self.vocab_size, self.step_s = vocab_size, step_s
        self.sequences: dict[str, _Sequence] = {}
        self.iteration = 0
        self.listener: WorkListener = lambda work: None

    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams, guide: object = None) -> None:
        if len(prompt) >= MAX_SEQ_LEN:
            raise RequestError(f"the prompt has {len(prompt)} tokens, the engine takes {MAX_SEQ_LEN - 1}")
        if prompt[0] == POISON:
            raise ValueError("poison")
        if prompt[0] == PANIC:
            raise PanicException("a pattern took too long")
        self.sequences[request_id] = _Sequence(list(prompt), params)

    def abort(self, request_id: str) -> bool:
        return self.sequences.pop(request_id, None) is not None

    def watch(self, listener: WorkListener) -> None:
        self.listener = listener

    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    def step(self) -> list[SimpleNamespace]:
        self.listener(Work("decode", len(self.sequences)))
        self._be_odd()
        time.sleep(self.step_s)
        self.iteration += 1
        outputs = []
        for request_id, sequence in list(self.sequences.items()):
            token = next_token(sequence.tokens, self.vocab_size)
            sequence.tokens.append(token)
            sequence.num_generated += 1
            finished = sequence.num_generated == sequence.params.max_tokens
            if finished:
                del self.sequences[request_id]
            logprobs = None if sequence.params.logprobs is None else [SimpleNamespace(logprob=-1.0, rank=1, top={})]
            reason = "length" if finished else None
            outputs.append(
                SimpleNamespace(
                    request_id=request_id,
                    index=0,
                    new_token_ids=[token],
                    logprobs=logprobs,
                    finished=finished,
                    finish_reason=reason,
                    stop_reason=None,
                    logits=None,
                    metrics=None,
                )
            )
        return outputs

    def _be_odd(self) -> None:
        """What a request whose first token says so does to its step."""
        for sequence in self.sequences.values():
            if sequence.tokens[0] == SPIN and sequence.num_generated:
                while True:
                    pass
            if sequence.tokens[0] == HOLD and sequence.num_generated:
                ctypes.PyDLL(None).sleep(3600)  # does not let go of the interpreter's lock

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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int, required=True)
    parser.add_argument("--server-pid", type=int)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.002)
    args = parser.parse_args()
    exit_with_parent()
    sock = socket.socket(fileno=args.socket_fd)
    pulse = Pulse(Heartbeat(args.heartbeat_fd).beat)
    server = EngineServer(sock, lambda: FakeEngine(args.vocab_size, args.step_s), lambda f: SamplingParams(**f), pulse)
    return server.run()


if __name__ == "__main__":
    sys.exit(main())
