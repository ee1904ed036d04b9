"""A C++ library of TensorRT's plugins, for deployments without Python, written and compiled from their definitions.

It is compiled against TensorRT's public headers, which are in NVIDIA's repository of TensorRT (`include/`). A plan
holds its kernels, so one library runs all; to build plans with it, it is given the kernels of their plugins.

    python -m plugins.trt_cpp --headers TensorRT/include -o libkvforge_plugins.so
"""

import argparse
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.build import find_compiler
from plugins.errors import PluginError
from plugins.trt_launch import Launch, Recorder, formula_of, pack
from plugins.trt_plugin import DATA_TYPES, Attributes, InPlace, PluginDefinition, SymbolicTensor, Tensors
from plugins.trt_plugins import PLUGINS

SOURCE = Path(__file__).with_name("trt_library.cc")
_RANK = 8
_NUMBERS = {"FLOAT": 0, "HALF": 1, "INT8": 2, "INT32": 3, "FP8": 6, "BF16": 7, "INT64": 8}
"""The values of TensorRT's `DataType`."""
_CUDA_FOLDERS = ("/usr/local/cuda/include", "/usr/include")


@dataclass(frozen=True)
class Use:
    """A plugin as a network has it, with its kernels."""

    definition: PluginDefinition
    tensors: Tensors
    attributes: Attributes
    kernels: Sequence[Launch]


@dataclass(frozen=True)
class _InputType:
    """Stands for the dtype of an input, whatever it is."""

    index: int


def key_of(use: Use) -> str:
    """What tells which kernels a plugin needs: its name, types and constant sizes of inputs, and attributes' bits."""
    parts = [use.definition.name]
    for name in use.definition.inputs:
        tensor = use.tensors[name]
        parts.append(",".join(map(str, (_NUMBERS[DATA_TYPES[tensor.dtype]], *tensor.shape))))
    for name, kind in use.definition.attributes:
        packed = struct.pack("<f" if kind is float else "<i", use.attributes[name])
        parts.append(str(struct.unpack("<I", packed)[0]))
    return "|".join(parts)


def descriptions(uses: Sequence[Use] = ()) -> str:
    """What `trt_library.cc` includes: all plugins, and these uses' kernels."""
    kernels = {key_of(use): pack(use.kernels).decode("ascii") for use in uses}
    lines = ["std::vector<Definition> const DEFINITIONS = {", *map(_definition, PLUGINS.values()), "};"]
    lines += ["struct Kernels { char const* key; char const* data; size_t size; };"]
    lines += ["std::vector<Kernels> const KERNELS = {"]
    for key, data in kernels.items():
        lines.append(f'{{"{key}", R"kernels({data})kernels", {len(data)}}},')
    return "\n".join([*lines, "};", ""])


def _definition(definition: PluginDefinition) -> str:
    inputs = {
        name: SymbolicTensor(_InputType(index), tuple(Recorder(f"i{index}.{dim}") for dim in range(_RANK)))  # type: ignore[arg-type]
        for index, name in enumerate(definition.inputs)
    }
    integers = {name: Recorder(f"a.{name}") for name, kind in definition.attributes if kind is int}
    attributes = ", ".join(f'{{"{name}", {str(kind is float).lower()}}}' for name, kind in definition.attributes)
    outputs = ", ".join(_output(output, inputs) for output in definition.outputs(inputs, integers))
    types = ", ".join(_braces(f"DataType::k{DATA_TYPES[dtype]}" for dtype in types) for types in definition.types)
    return f'{{"{definition.name}", {len(definition.inputs)}, {{{attributes}}}, {{{outputs}}}, {{{types}}}}},'


def _output(output: SymbolicTensor | InPlace, inputs: Mapping[str, SymbolicTensor]) -> str:
    alias = [*inputs].index(output.name) if isinstance(output, InPlace) else -1
    tensor = inputs[output.name] if isinstance(output, InPlace) else output
    shape_of = next((index for index, given in enumerate(inputs.values()) if given.shape is tensor.shape), -1)
    shape = _braces(f'"{formula_of(size)}"' for size in (tensor.shape if shape_of < 0 else ()))
    kind: Any = tensor.dtype
    dtype_of, dtype = (kind.index, "FLOAT") if isinstance(kind, _InputType) else (-1, DATA_TYPES[kind])
    return f"{{{alias}, {shape_of}, {dtype_of}, DataType::k{dtype}, {shape}}}"


def _braces(parts: Any) -> str:
    return "{" + ", ".join(parts) + "}"


def compile_library(headers: Path, library: Path, uses: Sequence[Use] = ()) -> None:
    """Compile the library; `headers` is the folder with TensorRT's `NvInferRuntime.h`.

    Raises:
        PluginError: no such header, no CUDA headers, no compiler, or it fails, or the library cannot be written.
    """
    if not (headers / "NvInferRuntime.h").is_file():
        raise PluginError(
            f"{headers} has no NvInferRuntime.h; give the folder include of NVIDIA's repository TensorRT."
        )
    try:
        _compile(find_compiler(), headers, library, uses)
    except OSError as error:
        raise PluginError(
            f"{library} cannot be written ({error.strerror}); name a file in a folder that is there and has room."
        ) from error


def _compile(compiler: str, headers: Path, library: Path, uses: Sequence[Use]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        (Path(scratch) / "descriptions.inc").write_text(descriptions(uses), encoding="ascii")
        output = Path(scratch) / library.name
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", f"-I{scratch}", f"-isystem{headers}"]
        command += [f"-isystem{cuda_headers()}", str(SOURCE), "-ldl", "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            first = next((line for line in result.stderr.splitlines() if "error" in line), "no message")
            raise PluginError(f"{compiler} did not compile the plugins' library ({first}); give matching headers.")
        os.replace(output, library)


def cuda_headers() -> Path:
    """The folder with `cuda_runtime_api.h`: a CUDA toolkit's, or Triton's own."""
    import importlib.util

    triton = importlib.util.find_spec("triton")
    places = [*map(Path, _CUDA_FOLDERS)]
    if os.environ.get("CUDA_HOME"):
        places.insert(0, Path(os.environ["CUDA_HOME"]) / "include")
    if triton is not None and triton.origin is not None:
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "include")
    for place in places:
        if (place / "cuda_runtime_api.h").is_file():
            return place
    raise PluginError("There are no CUDA headers (cuda_runtime_api.h); install a CUDA toolkit, or Triton.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the library that runs plans; returns the exit code, 1 after a sentence on what is missing."""
    parser = argparse.ArgumentParser(description="Compile TensorRT's plugins for deployments without Python.")
    parser.add_argument("--headers", type=Path, required=True, help="folder with TensorRT's NvInferRuntime.h")
    parser.add_argument("-o", "--output", type=Path, required=True, help="library to write")
    options = parser.parse_args(arguments)
    try:
        compile_library(options.headers, options.output)
    except PluginError as error:
        print(f"trt_cpp: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
