"""Requests to Triton from a seed: good ones, whose answer is known, and good ones with something broken."""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.support.hostile.neighbours.guides import GUIDE_KINDS, random_guide

NUMPY = {
    "BOOL": np.bool_, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "UINT8": np.uint8,
    "UINT32": np.uint32, "UINT64": np.uint64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
NAN, INF = float("nan"), float("inf")
FLOATS = [NAN, INF, -INF, 0.0, -0.0, -1.0, 0.5, 1.0, 1.5, 60000.0, 1e-45]
TEXTS = [
    b"", b"a", b"\xff\xfe", b"\xed\xa0\x80", b"\x00", b"t1 t2", b'{"type":', b"[" * 500, b"x" * 3000, b"..", b"\n\r",
    "\u202e\U0001f600".encode(), b"%s%n{0}", b"json", b"regex", b"(a+)+$", b"\xf0\x9f\x98",
]  # fmt: skip
REQUEST_IDS = ["", "a", "\n", "..", "\U0001f600", '"};', "x" * 2000, "%s", "0.0", "\x7f"]
GUIDE = "guided_decoding_guide"
MOST_TOKENS = 16
"""A mutated request asks for no more: the time to answer has a bound."""


@dataclass(frozen=True)
class Tensor:
    """An input as it goes on the wire; `values` are numbers, or bytes for BYTES, and need not fill `shape`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: tuple[Any, ...]

    def raw(self) -> bytes:
        """The bytes of KServe's binary representation."""
        if self.datatype == "BYTES":
            return b"".join(struct.pack("<I", len(value)) + value for value in self.values)
        with np.errstate(all="ignore"):
            return np.array(self.values, dtype=NUMPY[self.datatype]).tobytes()


@dataclass(frozen=True)
class Case:
    """One request. `expected` is the answer (token ids or text) where nothing is broken, else None."""

    model: str
    tensors: tuple[Tensor, ...]
    expected: tuple[int, ...] | str | None = None
    request_id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    broken: tuple[str, ...] = ()


def extreme(rng: random.Random, datatype: str) -> Any:
    """A value at or beyond the edge of what anyone sends."""
    if datatype == "BYTES":
        return rng.choice(TEXTS)
    if datatype == "BOOL":
        return rng.random() < 0.5
    if datatype.startswith("FP"):
        return rng.choice(FLOATS)
    info = np.iinfo(NUMPY[datatype])
    return rng.choice([info.min, info.max, 0, 1, info.max // 2, min(info.max, 7), max(info.min, -1)])


@dataclass(frozen=True)
class Mutator:
    """Breaks good requests; `inputs` are all inputs of the model as (name, datatype, dims without the batch)."""

    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]

    def broken(self, rng: random.Random, case: Case) -> Case:
        """`case` with one to three things broken, in the order of `Case.broken`."""
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            name = rng.choice(list(MUTATIONS))
            case = replace(MUTATIONS[name](self, rng, case), broken=(*case.broken, name), expected=None)
        return replace(case, tensors=tuple(map(_bounded, case.tensors)))

    def any_tensor(self, rng: random.Random) -> Tensor:
        """Some input of the model, of its datatype and rank, with extreme values."""
        name, datatype, dims = rng.choice(self.inputs)
        shape = (1, *(rng.choice([0, 1, 2, 5]) if dim < 0 else dim for dim in dims))
        return Tensor(name, datatype, shape, tuple(extreme(rng, datatype) for _ in range(int(np.prod(shape)))))


def _bounded(tensor: Tensor) -> Tensor:
    if tensor.name not in ("max_tokens", "request_output_len", "REQUEST_OUTPUT_LEN") or tensor.datatype == "BYTES":
        return tensor
    values = (value if value != value or value <= MOST_TOKENS else MOST_TOKENS for value in tensor.values)
    return replace(tensor, values=tuple(values))


def _change_one(rng: random.Random, case: Case, change: Callable[[Tensor], Tensor]) -> Case:
    if not case.tensors:
        return case
    chosen = rng.randrange(len(case.tensors))
    return replace(case, tensors=tuple(change(t) if i == chosen else t for i, t in enumerate(case.tensors)))


def _extreme_values(self: Mutator, rng: random.Random, case: Case) -> Case:
    def change(tensor: Tensor) -> Tensor:
        return replace(tensor, values=tuple(extreme(rng, tensor.datatype) for _ in tensor.values))

    return _change_one(rng, case, change)


def _datatype(self: Mutator, rng: random.Random, case: Case) -> Case:
    def change(tensor: Tensor) -> Tensor:
        datatype = rng.choice([*NUMPY, "BYTES"])
        return replace(tensor, datatype=datatype, values=tuple(extreme(rng, datatype) for _ in tensor.values))

    return _change_one(rng, case, change)


def _shape(self: Mutator, rng: random.Random, case: Case) -> Case:
    shapes = [(), (0,), (1,), (1, 0), (2, 1), (1, 1, 1), (1, 70000), (-1,), (2**31, 2**31), (2**62, 4), (300, 1)]
    return _change_one(rng, case, lambda tensor: replace(tensor, shape=rng.choice(shapes)))


def _whole_shape(self: Mutator, rng: random.Random, case: Case) -> Case:
    """Another shape, with as many values: all batch dimensions in all tensors at random."""
    shape = rng.choice([(1, 1), (2, 1), (3, 1), (1, 4), (2, 2, 2), (257, 1), (1, 2, 3), (0, 1)])
    count = int(np.prod(shape))

    def change(tensor: Tensor) -> Tensor:
        values = (tensor.values or (extreme(rng, tensor.datatype),)) * count
        return replace(tensor, shape=shape, values=values[:count])

    if rng.random() < 0.5:
        return _change_one(rng, case, change)
    return replace(case, tensors=tuple(map(change, case.tensors)))


def _too_few_values(self: Mutator, rng: random.Random, case: Case) -> Case:
    return _change_one(rng, case, lambda tensor: replace(tensor, values=tensor.values[:-1]))


def _missing(self: Mutator, rng: random.Random, case: Case) -> Case:
    left = list(case.tensors)
    if left:
        left.pop(rng.randrange(len(left)))
    return replace(case, tensors=tuple(left))


def _twice(self: Mutator, rng: random.Random, case: Case) -> Case:
    return replace(case, tensors=(*case.tensors, *rng.sample(case.tensors, min(1, len(case.tensors)))))


def _unknown(self: Mutator, rng: random.Random, case: Case) -> Case:
    name = rng.choice(["", "no_such_input", "text_input ", "INPUT", "../..", "\x00", "stream_state", "é" * 400])
    return replace(case, tensors=(*case.tensors, Tensor(name, "INT32", (1, 1), (1,))))


def _optional(self: Mutator, rng: random.Random, case: Case) -> Case:
    """Optional inputs with extreme values: the way to NaN temperatures, forged stream keys, absurd word lists."""
    more = [self.any_tensor(rng) for _ in range(rng.choice([1, 1, 2, 4]))]
    names = {tensor.name for tensor in more}
    return replace(case, tensors=(*(t for t in case.tensors if t.name not in names), *more))


def _request_id(self: Mutator, rng: random.Random, case: Case) -> Case:
    return replace(case, request_id=rng.choice(REQUEST_IDS))


def _outputs(self: Mutator, rng: random.Random, case: Case) -> Case:
    names = ["no_such_output", "", "text_output", "output_ids", "generation_logits", "stream_state", "OUTPUT"]
    return replace(case, outputs=tuple(rng.sample(names, rng.choice([1, 2, 3]))))


def _parameters(self: Mutator, rng: random.Random, case: Case) -> Case:
    names = [
        "timeout",
        "priority",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "binary_data",
        "x" * 500,
        "",
        "stop",
    ]
    values = [0, 1, -1, 2**63 - 1, True, "text", "\n", "", 0.5]
    return replace(case, parameters={name: rng.choice(values) for name in rng.sample(names, rng.choice([1, 2]))})


def _guide(self: Mutator, rng: random.Random, case: Case) -> Case:
    """A guide made to cost much, where the model takes one."""
    if GUIDE not in {name for name, _, _ in self.inputs}:
        return case
    ((field, guide),) = random_guide(rng.randrange(2**32)).items()
    given = (Tensor(f"{GUIDE}_type", "BYTES", (1, 1), (GUIDE_KINDS[field].encode(),)),
             Tensor(GUIDE, "BYTES", (1, 1), (guide.encode(),)))  # fmt: skip
    return replace(case, tensors=(*(t for t in case.tensors if not t.name.startswith(GUIDE)), *given))


def _long_list(self: Mutator, rng: random.Random, case: Case) -> Case:
    """A list with far more entries than anyone sends."""
    lists = [(name, datatype) for name, datatype, dims in self.inputs if dims and dims[-1] < 0]
    name, datatype = rng.choice(lists) if lists else ("", "")
    if not name or datatype == "BOOL":
        return case
    count = rng.choice([5000, 50_000])
    dims = next(dims for known, _, dims in self.inputs if known == name)
    shape = (1, *(2 if dim == 2 else 1 for dim in dims[:-1]), count)
    value = b"w" if datatype == "BYTES" else 1
    values = (value,) * int(np.prod(shape))
    return replace(case, tensors=(*(t for t in case.tensors if t.name != name), Tensor(name, datatype, shape, values)))


MUTATIONS: dict[str, Callable[[Mutator, random.Random, Case], Case]] = {
    "extreme values": _extreme_values,
    "datatype": _datatype,
    "shape": _shape,
    "whole shape": _whole_shape,
    "too few values": _too_few_values,
    "missing": _missing,
    "twice": _twice,
    "unknown": _unknown,
    "optional": _optional,
    "request id": _request_id,
    "outputs": _outputs,
    "parameters": _parameters,
    "guide": _guide,
    "long list": _long_list,
}
