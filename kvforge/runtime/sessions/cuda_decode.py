"""Decode-only steps under CUDA graphs: one captured pair of graphs per padded batch size and width of page tables.

A step of S sequences with one token each runs in the bucket of B >= S sequences and M >= its page-table columns.
Sequences S..B-1 are padding and keep to the operators' contract: one token of id 0 at position 0 whose slot is -1,
so nothing is written; a K,V length of 1 on page 0, so one key that exists is read; rows S..B-1 of hidden state and
logits are cut off. Rows never mix, so padding changes no result, except that a GEMM of another size may round
differently. Columns beyond a sequence's own pages are never read. Tables of the KV policy's own pages have a width of
their own, and padding has neutral inputs of the policy.

All graphs of one kind leave their result in one tensor, so that many graphs take little more memory than one.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvforge.manifest import Manifest
from kvforge.runtime.sessions.aot_package import Graph
from kvforge.runtime.sessions.cuda_staging import StepBuffer
from kvforge.runtime.sessions.inputs import LowerStep, UpperStep, known_ids
from kvforge.runtime.sessions.policy_inputs import PolicyInputs, input_shapes

MAX_GRAPH_SEQS = 512
"""Larger decode batches run without a graph: their kernels take longer than their launches."""

MIN_COLUMNS = 128
"""The fewest page-table columns of a graph, so that short and growing sequences share one."""


class Captured(Protocol):
    """A recorded piece of work that can run again on the same addresses."""

    def replay(self) -> None:
        """Queue the work."""


Capture = Callable[[Callable[[], Tensor]], tuple[Captured, Tensor]]
"""Runs a function under capture; returns the recording and the tensor that each replay writes."""


@dataclass(frozen=True)
class DecodeGraph:
    """A captured graph and where its result appears."""

    work: Captured
    result: Tensor


def batch_bucket(num_seqs: int, max_num_seqs: int) -> int | None:
    """Return the padded batch size: 1, 2, 4, 8, then multiples of 8, above 64 of 16, above 256 of 32; never above
    ``max_num_seqs``. None above ``MAX_GRAPH_SEQS``."""
    if num_seqs > MAX_GRAPH_SEQS:
        return None
    if num_seqs <= 8:
        bucket = 1 << (num_seqs - 1).bit_length()
    else:
        step = 8 if num_seqs <= 64 else 16 if num_seqs <= 256 else 32
        bucket = -(-num_seqs // step) * step
    return min(bucket, max_num_seqs)


def width_bucket(num_columns: int, max_columns: int) -> int:
    """Return the padded number of page-table columns: a power of two from ``MIN_COLUMNS`` on, at most
    ``max_columns``."""
    return min(max(MIN_COLUMNS, 1 << (num_columns - 1).bit_length()), max_columns)


def is_one_each(starts: Tensor, num_tokens: int) -> bool:
    """Whether ``starts`` ``[S+1]`` gives each of S sequences one of S packed tokens."""
    num_seqs = starts.shape[0] - 1
    return num_tokens == num_seqs and bool((starts == torch.arange(num_seqs + 1, dtype=starts.dtype)).all())


class DecodeGraphs:
    """Captures graphs on demand and replays them. The pools must be the same tensors at every call."""

    def __init__(
        self, manifest: Manifest, lower: Graph, upper: Graph, buffers: tuple[StepBuffer, StepBuffer], capture: Capture
    ) -> None:
        self._policy = manifest.policy
        self._max_seqs = min(manifest.max_num_seqs, manifest.max_num_tokens)
        self._max_columns = -(-manifest.max_seq_len // manifest.page_size)
        self._lower, self._upper = lower, upper
        self._lower_buffer, self._upper_buffer = buffers
        self._capture = capture
        self._captured: dict[tuple[str, tuple[int, ...]], DecodeGraph] = {}
        self._results: dict[str, Tensor] = {}

    def bucket(self, num_seqs: int, page_table: Tensor, state: PolicyInputs) -> tuple[int, ...] | None:
        """Return (B, M), with ``state`` (B, M, Ms), for a decode step, None if it is to run without a graph."""
        batch = batch_bucket(num_seqs, self._max_seqs)
        if batch is None:
            return None
        widths = [page_table.shape[1]]
        if state:
            kinds = self._policy.keeping.state_inputs
            widths.append(
                max((one.shape[1] for one, kind in zip(state, kinds, strict=True) if kind.is_table), default=1)
            )
        return (batch, *(width_bucket(width, self._max_columns) for width in widths))

    def lower(self, bucket: tuple[int, ...], step: LowerStep, pools: Sequence[Tensor]) -> Tensor:
        """Return hidden ``[S, hidden_size]``, valid until the next decode step."""
        batch, width = bucket[:2]
        num_seqs = step.input_ids.shape[0]
        shapes = [(batch,), (batch,), (batch,), (batch + 1,), (batch,), (batch, width)]
        rows = () if step.chosen is None else step.chosen[1:]
        host = self._lower_buffer.host([*shapes, *self._state_shapes(bucket), *(one.shape for one in rows)])
        for target, source, padding in zip(
            (host[0], host[1], host[2], host[4]),
            (step.input_ids, step.positions, step.slot_mapping, step.kv_length),
            (0, 0, -1, 1),
            strict=True,
        ):
            _fill(target, source, padding)
        torch.arange(batch + 1, out=host[3])
        _fill_table(host[5], step.page_table)
        for one in rows:
            host.pop().copy_(one)
        self._fill_state(host[6:], step.state)
        inputs = self._lower_buffer.device()
        if rows:
            known_ids(step, inputs[0], inputs.pop())
        step_inputs, state = inputs[:6], inputs[6:]
        return self._run("lower", bucket, lambda: self._lower([*step_inputs, *pools, *state])[0], state)[:num_seqs]

    def upper(self, bucket: tuple[int, ...], step: UpperStep, pools: Sequence[Tensor]) -> Tensor:
        """Return logits ``[S, vocab_size]`` on the device, valid until the next decode step."""
        batch, width = bucket[:2]
        hidden, num_seqs = step.hidden, step.hidden.shape[0]
        shapes = [(batch,), (batch + 1,), (batch,), (batch,), (batch, width)]
        host = self._upper_buffer.host([*shapes, *self._state_shapes(bucket)])
        torch.arange(batch, out=host[0])
        torch.arange(batch + 1, out=host[1])
        _fill(host[2], step.positions, 0)
        _fill(host[3], step.kv_length, 1)
        _fill_table(host[4], step.page_table)
        self._fill_state(host[5:], step.state)
        inputs = self._upper_buffer.device()
        static = self._place("lower", hidden)[:batch]
        if hidden.data_ptr() != static.data_ptr():
            static[:num_seqs].copy_(hidden)
        step_inputs, state = [static, *inputs[:5]], inputs[5:]
        return self._run("upper", bucket, lambda: self._upper([*step_inputs, *pools, *state])[0], state)[:num_seqs]

    def clear(self) -> None:
        """Forget all captured graphs."""
        self._captured.clear()

    def _run(
        self, name: str, bucket: tuple[int, ...], function: Callable[[], Tensor], state: Sequence[Tensor]
    ) -> Tensor:
        """Replay the bucket's graph of ``function``, captured if need be, and return its result, padding included.
        ``state`` are those of its inputs that are the KV policy's."""
        graph = self._captured.get((name, bucket))
        if graph is None:
            graph = self._captured[name, bucket] = self._record(name, function, state)
        graph.work.replay()
        return graph.result

    def _record(self, name: str, function: Callable[[], Tensor], state: Sequence[Tensor]) -> DecodeGraph:
        """Capture ``function``. That runs it once more than it is replayed, which would do twice what the KV
        policy does in a step: in that run its inputs are neutral. K,V that it writes are written again."""

        def into_place() -> Tensor:
            result = function()
            return self._place(name, result)[: result.shape[0]].copy_(result)

        values = [one.clone() for one in state]
        for one, kind in zip(state, self._policy.keeping.state_inputs, strict=False):  # () where all are neutral
            one.fill_(kind.neutral)
        graph = DecodeGraph(*self._capture(into_place))
        for one, own in zip(state, values, strict=True):
            one.copy_(own)
        return graph

    def _state_shapes(self, bucket: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes of the KV policy's padded inputs in a bucket (B, M, Ms); of (B, M) there are none."""
        return input_shapes(self._policy, bucket[0], bucket[2]) if len(bucket) == 3 else []

    def _fill_state(self, target: Sequence[Tensor], state: PolicyInputs) -> None:
        for one, source, kind in zip(target, state, self._policy.keeping.state_inputs, strict=False):
            if kind.is_table:
                _fill_table(one, source)
            else:
                _fill(one, source, kind.neutral)

    def _place(self, name: str, like: Tensor) -> Tensor:
        """Where every graph of this name leaves its result: rows as ``like``'s, of the largest batch."""
        if name not in self._results:
            rows = min(self._max_seqs, MAX_GRAPH_SEQS)
            with torch.inference_mode(False):  # so that it may be written within inference mode and without
                self._results[name] = torch.zeros(rows, *like.shape[1:], dtype=like.dtype, device=like.device)
        return self._results[name]


def _fill(target: Tensor, source: Tensor, padding: int) -> None:
    target[: source.shape[0]] = source
    target[source.shape[0] :] = padding


def _fill_table(target: Tensor, page_table: Tensor) -> None:
    num_seqs, columns = page_table.shape
    target[:num_seqs, :columns] = page_table
    target[num_seqs:, 0] = 0


class GraphRecorder:
    """Captures functions as CUDA graphs whose memory is shared: they run one at a time, on one stream."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool: tuple[int, int] | None = None

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Captured, Tensor]:
        """Capture ``function`` after one run of it that loads its kernels."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.current_stream().synchronize()
        if not self._graphs:  # torch lets no graph join a memory pool that has lost its last one
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        self._graphs.add(graph)
        return graph, result
