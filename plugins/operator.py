"""What an operator's folder says of it; all else (schema, calls, names of inputs) follows from the reference."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "kvforge"
ISAS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
"""The instruction sets that kernels are compiled for, each with those before it; on other machines than x86 the first
alone."""
TILE_ISAS = ("amx_software", "amx")
"""AVX-512 with products by tiles: AMX's, and arrays in their place on which the same source is tested elsewhere."""

BACKEND_FILES = {
    "reference": "reference.py",
    "cpu": "cpu.cpp",
    "triton": "cuda.py",
    "onnx": "onnx.py",
    "tensorrt": "trt.py",
}
"""The file in an operator's folder for each backend; an operator has the backends whose files exist."""


@dataclass(frozen=True)
class Variants:
    """How a C++ file is compiled more than once: for each of `isas`, into the namespace KVFORGE_ISA, with `flags`."""

    isas: tuple[str, ...] = ("portable", "avx2", "avx512")
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operator(Generic[P, R]):
    """One operator with all its backends.

    `reference` is the definition in plain torch; its signature is the operator's. `version` grows with every change of
    meaning; an engine records it. `writes` names the tensors that are written in place, `graphs` the engine's graphs
    that may call it (a KV policy names its own operators). `variants` says which C++ files of the folder are compiled
    in another way than once for any machine.
    """

    reference: Callable[P, R]
    version: int
    writes: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()
    variants: Mapping[str, Variants] = field(default_factory=dict)

    @cached_property
    def folder(self) -> Path:
        """`plugins/<name>/`, or a folder of that kind elsewhere."""
        return Path(inspect.getfile(self.reference)).parent

    @property
    def name(self) -> str:
        """The folder's name, and the operator's in the torch.library namespace `kvforge`."""
        return self.folder.name

    @property
    def qualified_name(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    @cached_property
    def schema(self) -> str:
        """The signature in torch.library, without the name. Integers are plain: kernels get no symbolic ones."""
        return torch.library.infer_schema(self.reference, mutates_args=self.writes).replace("SymInt", "int")

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The schema's arguments, in order: `torch.Argument`s with `name` and `type`."""
        return tuple(torch._C.parse_schema(self.qualified_name + self.schema).arguments)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors that a call must give."""
        return tuple(a.name for a in self.arguments if str(a.type) == "Tensor")

    @property
    def optional_tensors(self) -> tuple[str, ...]:
        """The names of the tensors that a call may leave out."""
        return tuple(a.name for a in self.arguments if str(a.type) == "Optional[Tensor]")

    @property
    def attributes(self) -> tuple[tuple[str, type], ...]:
        """Names and types of the arguments that are numbers."""
        kinds = {"int": int, "float": float, "bool": bool}
        return tuple((a.name, kinds[str(a.type)]) for a in self.arguments if str(a.type) in kinds)

    def typed(self, *names: str) -> tuple[tuple[str, type], ...]:
        """Some of `attributes`, by name and in the order given: a node of another format does not take all."""
        types = dict(self.attributes)
        return tuple((name, types[name]) for name in names)

    @property
    def backends(self) -> tuple[str, ...]:
        """The implementations that exist, `reference` first."""
        return tuple(name for name, file in BACKEND_FILES.items() if (self.folder / file).is_file())

    def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the operator, by the backend of its tensors' device."""
        return getattr(torch.ops.kvforge, self.name)(*args, **kwargs)

    def write(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Tensor, ...]:
        """Call an operator without results; returns the tensors that it wrote, which are those given."""
        getattr(torch.ops.kvforge, self.name)(*args, **kwargs)
        given = self.bind(*args, **kwargs)
        return tuple(given[name] for name in self.writes if given[name] is not None)

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments of a call by name, defaults included."""
        given = dict(zip((a.name for a in self.arguments), args, strict=False)) | kwargs
        return {a.name: given.get(a.name, a.default_value) for a in self.arguments}
