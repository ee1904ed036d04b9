"""The C++ library of plugins, asked by a C++ program and started on a driver that writes down what it is told."""

import os
import struct
import subprocess
from pathlib import Path
from typing import Any

from plugins.trt_cpp import cuda_headers
from plugins.trt_launch import Launch, pack
from plugins.trt_plugins import PLUGINS

HERE = Path(__file__).parent
DTYPES = {0: "float32", 1: "float16", 2: "int8", 3: "int32", 6: "float8_e4m3fn", 7: "bfloat16", 8: "int64"}
"""TensorRT's numbers of data types."""


def ask_library(headers: Path, library: Path, cases: list[dict[str, Any]], launches: list[Launch]) -> list[dict]:
    """Of each case, as `tests.support.tensorrt.descriptions.as_json` has it, with its kernel: `aliases`,
    `combinations` and what is `started`."""
    folder = library.parent
    flags = ["g++", "-std=c++17", f"-isystem{headers}", f"-isystem{cuda_headers()}"]
    program, driver = folder / "ask_library", folder / "libcuda.so.1"
    subprocess.run([*flags, str(HERE / "ask_library.cc"), "-rdynamic", "-ldl", "-o", str(program)], check=True)
    subprocess.run([*flags, "-shared", "-fPIC", str(HERE / "fake_driver.cc"), "-o", str(driver)], check=True)
    question = b"".join(_question(case, launch) for case, launch in zip(cases, launches, strict=True))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    result = subprocess.run([program, library], input=question, capture_output=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr.decode()
    return [_answer(line) for line in result.stdout.decode().splitlines()]


def _question(case: dict[str, Any], launch: Launch) -> bytes:
    definition = PLUGINS[case["plugin"]]
    shapes = [[size[0] if isinstance(size, list) else size for size in shape] for _, shape in case["inputs"]]
    words: list[Any] = [definition.name, len(shapes)]
    for shape in shapes:
        words += [len(shape), *shape]
    words += [definition.num_outputs, len(launch.sizes), len(definition.attributes)]
    for name, kind in definition.attributes:
        bits = struct.pack("<f" if kind is float else "<i", case["attributes"][name])
        words += [name, "f" if kind is float else "i", struct.unpack("<I", bits)[0]]
    kernels = pack([launch])
    return f"{' '.join(map(str, words))} {len(kernels)}\n".encode() + kernels + b"\n"


def _answer(line: str) -> dict[str, Any]:
    aliases, combinations, started = (part.strip() for part in line.split("|"))
    found = [[DTYPES[int(number)] for number in types.split()] for types in combinations.split(";") if types.strip()]
    told: list[Any] = []
    if started:
        grid, arguments, stream = started.split(" : ")
        words = [["at", int(word[1:])] if word[0] == "@" else int(word) for word in arguments.split()]
        told = [[int(size) for size in grid.split()], words, int(stream)]
    return {
        "aliases": [int(alias) for alias in aliases.split()],
        "combinations": sorted(found),
        "started": told,
    }
