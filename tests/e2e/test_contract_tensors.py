"""Every tensor of TensorRT-LLM's Triton contract on the running server: name, datatype, dims, and what it does."""

import json
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import model_config_pb2

from kvforge import LLM
from kvforge.serving.health.probe import read_metrics
from kvforge.serving.server.launcher import TritonServer
from tests.support.serving.contract_outputs import REFUSED_OUTPUTS, assert_output_comes
from tests.support.serving.contract_probes import INPUTS, Probe

CONTRACT = json.loads((Path(__file__).parents[1] / "cpu/serving/contract/triton_contract.json").read_text())
MODELS = CONTRACT["models"]
EARLIER = json.loads((Path(__file__).parents[1] / "cpu/serving/contract/earlier_contract.json").read_text())["inputs"]
DESCRIBED = [model for model in MODELS if isinstance(MODELS[model]["inputs"][0], dict)]


def cases(kind: str) -> list[tuple[str, str]]:
    of_both = {model: MODELS[model][kind] + (EARLIER[model] if kind == "inputs" else []) for model in DESCRIBED}
    return [(model, tensor["name"]) for model in DESCRIBED for tensor in of_both[model]]


@pytest.mark.parametrize("model", DESCRIBED)
def test_names_datatypes_and_dims(server: TritonServer, model: str) -> None:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        config = client.get_model_config(model).config
        metadata = client.get_model_metadata(model)
    assert config.max_batch_size > 0
    kind_of = model_config_pb2.DataType.Name
    for kind, configured, described in (
        ("inputs", config.input, metadata.inputs),
        ("outputs", config.output, metadata.outputs),
    ):
        dims = {t.name: (kind_of(t.data_type).removeprefix("TYPE_"), list(t.dims)) for t in configured}
        shapes = {t.name: (t.datatype, list(t.shape)) for t in described}
        for tensor in MODELS[model][kind]:
            name, datatype = tensor["name"], tensor["datatype"]
            assert dims[name] == (datatype, tensor["dims"])
            assert shapes[name] == (datatype.replace("STRING", "BYTES"), [-1, *tensor["dims"]])
    optional = {tensor.name: tensor.optional for tensor in config.input}
    assert {t["name"]: optional[t["name"]] for t in MODELS[model]["inputs"]} == {
        t["name"]: t["optional"] for t in MODELS[model]["inputs"]
    }


@pytest.mark.parametrize(("model", "name"), cases("inputs"))
def test_input_is_honoured_or_refused_by_name(server: TritonServer, llm: LLM, model: str, name: str) -> None:
    assert name in INPUTS[model], f"input {name} of {model} has no probe"
    INPUTS[model][name](Probe(server, llm, model))


@pytest.mark.parametrize(("model", "name"), cases("outputs"))
def test_output_comes_when_asked_for(server: TritonServer, llm: LLM, model: str, name: str) -> None:
    probe = Probe(server, llm, model)
    if name in REFUSED_OUTPUTS:
        assert f"'{REFUSED_OUTPUTS[name]}' cannot be used" in probe.refusal(**{REFUSED_OUTPUTS[name]: True})
        assert name not in probe.responses()[0].tensors
        return
    assert_output_comes(probe, name)


def test_metrics_are_those_of_the_contract(server: TritonServer) -> None:
    found = read_metrics(server.metrics_url)
    for family, described in CONTRACT["metrics"].items():
        for value in described["values"]:
            assert any(name.startswith(f"{family}{{") and f'{described["label"]}="{value}"' in name for name in found)
