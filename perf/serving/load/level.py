"""One engine behind Triton under perf_analyzer, level by level."""

import argparse
from collections.abc import Callable
from typing import Any

from kvforge.bench.traces import Goals
from kvforge.serving.server.launcher import TritonServer
from perf.serving.load.perf_analyzer import run_perf_analyzer
from perf.serving.load.profile_export import read_traces, summarise


class LevelMeter:
    """Runs levels of load on ``model`` of a server, of requests that ``inputs`` makes for (number, seed); ``args`` has
    ``input_tokens``, ``output_tokens`` and ``timeout_s``. The server is warmed up first."""

    def __init__(
        self,
        server: TritonServer,
        model: str,
        inputs: Callable[[int, int], list[dict[str, Any]]],
        args: argparse.Namespace,
        goals: Goals | None = None,
    ) -> None:
        self._server, self._model, self._inputs, self._args = server, model, inputs, args
        self._goals = goals or Goals()
        self._run(["--concurrency-range", "1"], 2, seed=10**6)

    def measure(self, options: list[str], num: int, seed: int) -> dict[str, Any]:
        """Return the numbers of ``num`` requests at the level that perf_analyzer's ``options`` say."""
        experiment, lengths = self._run(options, num, seed), (self._args.input_tokens, self._args.output_tokens)
        return summarise(read_traces(experiment), len(experiment["requests"]), *lengths, self._goals)

    def _run(self, options: list[str], num: int, seed: int) -> dict[str, Any]:
        data, url = self._inputs(num, seed), self._server.grpc_url
        return run_perf_analyzer(url, self._model, data, options, num, self._args.timeout_s)


def label_interval(name: str, interval: int) -> str:
    """``name`` in a table, with the number of tokens in a response unless that is one."""
    return name if interval == 1 else f"{name}, {f'{interval} tokens' if interval else 'all that wait'} in a response"
