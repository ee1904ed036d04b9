"""What tests of a running server share: metrics, waiting, and a client in a process that can be killed."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from kvforge.runtime import CompletionOutput
from kvforge.serving.client import StreamingClient
from kvforge.serving.health.probe import read_metrics
from kvforge.serving.processes.facts import ProcessId, descendants
from kvforge.serving.server.launcher import TritonServer

USED_PAGES = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"}'
WAIT_S = 120.0
"""Far more than anything takes, also where the machine has other work."""
ENDLESS = 60000
"""Tokens of a request that runs for much longer than any wait of a test."""


def without_end(output: CompletionOutput) -> list[int]:
    """The tokens that `tensorrt_llm` gives: all but an end token or stop token."""
    ended = output.finish_reason == "stop" and not isinstance(output.stop_reason, str | tuple)
    return list(output.token_ids[:-1] if ended else output.token_ids)


@contextlib.contextmanager
def started(server: TritonServer) -> Iterator[TritonServer]:
    """The server while it runs. A start that fails shows its log, which goes with it."""
    try:
        server.start()
    except BaseException:
        print(log_of(server), file=sys.stderr)
        raise
    try:
        yield server
    finally:
        server.stop()


def log_of(server: TritonServer) -> str:
    """What a failed test shows of a server: why it no longer serves, and its last lines."""
    return "\n".join([f"failure: {server.failure()}", *server._log_lines()])


def used_pages(server: TritonServer) -> float:
    return read_metrics(server.metrics_url)[USED_PAGES]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> float:
    """Seconds until `condition` held; AssertionError when it never did within the time."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - started


def ask(model: str, prompt: list[int] | str, max_tokens: int, streaming: bool = True, **more: Any) -> dict[str, Any]:
    """The inputs of a request: token ids for `tensorrt_llm`, text for the others. ENDLESS passes end-of-text."""
    if max_tokens == ENDLESS:
        more = {"end_id": -1, **more}
    if model != "tensorrt_llm":
        return {"text_input": prompt, "max_tokens": max_tokens, "stream": streaming, **more}
    return {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": max_tokens,
            "streaming": streaming, **more}  # fmt: skip


def infer_input(name: str, array: np.ndarray) -> grpcclient.InferInput:
    """`array` as a request input, of the datatype that fits it."""
    datatype = {
        "int64": "INT64",
        "float16": "FP16",
        "object": "BYTES",
        "int32": "INT32",
        "uint64": "UINT64",
        "bool": "BOOL",
    }
    tensor = grpcclient.InferInput(name, list(array.shape), datatype[array.dtype.name])
    tensor.set_data_from_numpy(array)
    return tensor


def streamed(server: TritonServer, prompt: list[int], max_tokens: int = 16) -> list[int]:
    """The tokens of a greedy answer that no end token ends, on a connection of its own."""
    with StreamingClient(server.grpc_url) as client:
        request = ask("tensorrt_llm", prompt, max_tokens, end_id=-1)
        return [token for response in client.generate("tensorrt_llm", request) for token in response.token_ids]


def text_of(server: TritonServer, inputs: Mapping[str, Any], model: str = "ensemble") -> str:
    """The joined pieces of a text model's answer on a connection of its own."""
    with StreamingClient(server.grpc_url) as client:
        return "".join(response.text for response in client.generate(model, inputs))


def lasting_processes(pid: int) -> list[ProcessId]:
    """All that `pid` started, directly or not, but the workers that judge guides: those come and go."""
    found = []
    for process in descendants(pid):
        with contextlib.suppress(OSError):
            if b"kvforge.runtime.guides.worker" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                found.append(process)
    return found


def engine_process(server_pid: int) -> ProcessId:
    """The engine's process of this tritonserver, by the socket that its stub gave it."""
    (found,) = [
        process
        for process in lasting_processes(server_pid)
        if b"\0--socket-fd\0" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    ]
    return found


_CLIENT = """
import json, sys
from kvforge.serving.client import StreamingClient
url, model, inputs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
client = StreamingClient(url)
for response in client.generate(model, inputs):
    print("response", flush=True)
"""


def client_process(server: TritonServer, model: str, inputs: str) -> subprocess.Popen:
    """A client in a process of its own; `inputs` is JSON. It prints a line per response."""
    command = [sys.executable, "-c", _CLIENT, server.grpc_url, model, inputs]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
