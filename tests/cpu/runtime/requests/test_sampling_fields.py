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
    "kvforge/common/sampling_fields.py": {
        '        SamplingField("min_tokens"':
        '        SamplingField("top_a", 0.0, 0.0, 1.0, "drops tokens below this share of the largest squared",\n'
        '                      is_in_vllm=False),\n'
        '        SamplingField("min_tokens"',
    },
    "kvforge/runtime/requests/params.py": {
        "    min_p: float = 0.0\n": "    min_p: float = 0.0\n    top_a: float = 0.0\n",
    },
    "triton_repo/tensorrt_llm/config.pbtxt": {
        '  { name: "min_p" data_type: TYPE_FP32':
        '  { name: "top_a" data_type: TYPE_FP32 dims: [ 1 ] optional: true },\n'
        '  { name: "min_p" data_type: TYPE_FP32',
    },
    "kvforge/runtime/sampling/filters.py": {
        "    min_p: torch.Tensor\n": "    min_p: torch.Tensor\n    top_a: torch.Tensor\n",
        "            column([p.min_p for p in params]),\n":
        "            column([p.min_p for p in params]),\n            column([p.top_a for p in params]),\n",
        "return self.min_p > 0\n": "return (self.min_p > 0) | (self.top_a > 0)\n",
        "return self.min_p * largest\n":
        "return torch.maximum(self.min_p * largest, self.top_a * largest**2)\n",
    },
}  # fmt: skip
"""All that a new number takes which drops tokens and which vLLM lacks."""
PROGRAM = """
import argparse, json, sys
import numpy as np
import torch
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
from kvforge.runtime.sampling.draw import filter_logits
from kvforge.runtime.sampling.filters import Filters
from kvforge.runtime.sampling.state import RequestSampling
from kvforge.vllm_engine.params import check_honoured, vllm_fields

options = GatewayOptions()
params = sampling_params({"top_a": 0.5, "top_p": 0.9}, options, 9, 5, None, None, "max_tokens", {})
request = service_pb2.ModelInferRequest.FromString(request_template(params, 9, False))
tensors = {"input_ids": np.array([[5]], np.int32), "input_lengths": np.array([[1]], np.int32)}
for tensor, raw in zip(request.inputs, request.raw_input_contents):
    dtype = {"INT32": "<i4", "FP32": "<f4", "BOOL": "?", "UINT64": "<u8"}[tensor.datatype]
    tensors[tensor.name] = np.frombuffer(raw, dtype).reshape(tensor.shape)
(parsed,) = parse_batch(tensors, True)
parser = argparse.ArgumentParser()
add_sampling_options(parser, 16)
refusals = []
for refused in (lambda: SamplingParams(top_a=1.5), lambda: check_honoured(params)):
    try:
        refused()
    except Exception as error:
        refusals.append(str(error))
check_honoured(SamplingParams(top_p=0.9))
logits = torch.tensor([[0.4, 0.3, 0.2, 0.07, 0.03]] * 2).log()
asked = SamplingParams(top_a=0.5), SamplingParams(top_a=0.5, top_p=0.999)
states = [RequestSampling(each, [1], 5, frozenset(), []).state(0) for each in asked]
print(json.dumps({
    "file": table.__file__,
    "api": params.top_a,
    "stub": parsed.params["top_a"],
    "command": parser.parse_args(["--top-a", "0.25"]).top_a,
    "remote": "top_a" in _SAMPLING,
    "documents": sorted(path for path, body in BODIES.items()
                        if "top_a" in body_schema(body, options)["properties"]),
    "vllm": "top_a" in vllm_fields(params, 5, [], [], 0),
    "refusals": refusals,
    "kept": (filter_logits(logits, Filters.of(states, logits)) > -torch.inf).tolist(),
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
    """In a copy: the table, the dataclass, the server's configuration and the filters are edited, and nothing else."""
    for folder in ("kvforge", "model_defs", "plugins", "triton_repo"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    assert len(EDITS) <= 4
    for path, edits in EDITS.items():
        text = (tmp_path / path).read_text()
        for old, new in edits.items():
            assert text.count(old) == 1, f"{path} has changed: let EDITS add top_a to what it is now, not to {old!r}"
            text = text.replace(old, new)
        (tmp_path / path).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found.pop("file")).is_relative_to(tmp_path)
    assert found == {
        "api": 0.5, "stub": 0.5, "command": 0.25, "remote": True, "vllm": False,
        "documents": ["/v1/chat/completions", "/v1/completions", "/v1/messages",
                      "/v1/messages/count_tokens", "/v1/responses"],
        "refusals": ["top_a is 1.5; give a finite number of at least 0 and at most 1.",
                     "top_a is not offered by an engine of target vllm; leave it out."],
        "kept": [[True, True, True, False, False]] * 2,
    }  # fmt: skip
    assert "top_a" not in API_SAMPLING
