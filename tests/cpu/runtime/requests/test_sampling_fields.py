"""The table of numbers that choose tokens, and what is derived from it: a new one is described in one place."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvforge.common.sampling_fields import API_SAMPLING, SAMPLING_FIELDS
from kvforge.runtime.requests.params import SamplingParams

ROOT = Path(__file__).parents[4]
EDITS = {
    "kvforge/common/sampling_fields.py": (
        '        SamplingField("min_tokens"',
        '        SamplingField("typical_p", 1.0, 0.0, 1.0, "keeps the typical tokens", open_low=True),\n'
        '        SamplingField("min_tokens"',
    ),
    "kvforge/runtime/requests/params.py": (
        "    min_p: float = 0.0\n",
        "    min_p: float = 0.0\n    typical_p: float = 1.0\n",
    ),
    "triton_repo/tensorrt_llm/config.pbtxt": (
        '  { name: "min_p" data_type: TYPE_FP32',
        '  { name: "typical_p" data_type: TYPE_FP32 dims: [ 1 ] optional: true },\n'
        '  { name: "min_p" data_type: TYPE_FP32',
    ),
}
"""All that a new number takes beside the lines that compute with it."""
PROGRAM = """
import argparse, json, sys
import numpy as np
from tritonclient.grpc import service_pb2
import kvforge.common.sampling_fields as table
from kvforge.commands.remote_answers import _SAMPLING
from kvforge.commands.sampling_options import add_sampling_options
from kvforge.gateway.http.openapi import BODIES, body_schema
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.requests.sampling import sampling_params
from kvforge.gateway.engine.tensors import request_template
from kvforge.runtime.requests.params import SamplingParams
from kvforge.serving.contract.request import parse_batch
from kvforge.vllm_engine.params import vllm_fields

options = GatewayOptions()
params = sampling_params({"typical_p": 0.5, "top_p": 0.9}, options, 9, 5, None, None, "max_tokens", {})
request = service_pb2.ModelInferRequest.FromString(request_template(params, 9, False))
tensors = {"input_ids": np.array([[5]], np.int32), "input_lengths": np.array([[1]], np.int32)}
for tensor, raw in zip(request.inputs, request.raw_input_contents):
    dtype = {"INT32": "<i4", "FP32": "<f4", "BOOL": "?", "UINT64": "<u8"}[tensor.datatype]
    tensors[tensor.name] = np.frombuffer(raw, dtype).reshape(tensor.shape)
(parsed,) = parse_batch(tensors, True)
parser = argparse.ArgumentParser()
add_sampling_options(parser, 16)
try:
    SamplingParams(typical_p=0.0)
except Exception as error:
    refusal = str(error)
print(json.dumps({
    "file": table.__file__,
    "api": params.typical_p,
    "stub": parsed.params["typical_p"],
    "command": parser.parse_args(["--typical-p", "0.25"]).typical_p,
    "remote": "typical_p" in _SAMPLING,
    "documents": sorted(path for path, body in BODIES.items()
                        if "typical_p" in body_schema(body, options)["properties"]),
    "vllm": vllm_fields(params, 5, [], [], 0)["typical_p"],
    "refusal": refusal,
}))
"""


def test_the_parameters_have_the_defaults_of_the_table() -> None:
    defaults = {item.name: item.default for item in fields(SamplingParams)}
    for name, field in SAMPLING_FIELDS.items():
        assert defaults[name] == field.neutral and type(defaults[name]) is type(field.neutral), name


def test_the_server_s_inputs_have_the_datatypes_of_the_table() -> None:
    inputs = (ROOT / "triton_repo/tensorrt_llm/config.pbtxt").read_text()
    for name, field in SAMPLING_FIELDS.items():
        assert f'{{ name: "{field.tensor or name}" data_type: TYPE_{field.datatype} dims: [ 1 ]' in inputs, name


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_a_value_outside_its_range_is_refused_by_its_name(name: str) -> None:
    field = SAMPLING_FIELDS[name]
    for value in (field.low - 1, field.high + 1, None, True, "1", *([field.low] if field.open_low else [])):
        with pytest.raises(Exception, match=rf"^{name} is .*; give a "):
            SamplingParams(**{name: value})


def test_a_new_number_is_described_in_one_place(tmp_path: Path) -> None:
    """In a copy: the table, the dataclass and the server's configuration are edited, and nothing else."""
    for folder in ("kvforge", "model_defs", "plugins", "triton_repo"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    assert len(EDITS) <= 3
    for path, (old, new) in EDITS.items():
        text = (tmp_path / path).read_text()
        assert text.count(old) == 1, path
        (tmp_path / path).write_text(text.replace(old, new))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found.pop("file")).is_relative_to(tmp_path)
    assert found == {
        "api": 0.5, "stub": 0.5, "command": 0.25, "remote": True, "vllm": 0.5,
        "documents": ["/v1/chat/completions", "/v1/completions", "/v1/messages",
                      "/v1/messages/count_tokens", "/v1/responses"],
        "refusal": "typical_p is 0.0; give a finite number above 0 and at most 1.",
    }  # fmt: skip
    assert "typical_p" not in API_SAMPLING
