"""The model repository's configs against the contract: names, datatypes, dims, what is optional, the renames."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import kvforge
from kvforge.serving.contract.inputs import (
    ALIASES,
    SUPPORTED,
    UNSUPPORTED,
    WITHOUT_EFFECT,
    refuse_unsupported,
    with_todays_names,
)
from kvforge.serving.server.options import ServerOptions
from kvforge.serving.server.repository import materialise
from kvforge.serving.text_models.bls import FROM_PREPROCESSING, NOT_OFFERED, TO_ENGINE, TO_PREPROCESSING
from tests.support.serving.refusals import refused

CONTRACT = json.loads(Path(__file__).with_name("triton_contract.json").read_text())
EARLIER = json.loads(Path(__file__).with_name("earlier_contract.json").read_text())["inputs"]
OWN = {
    "stream_key", "stop_strings", "num_top_log_probs", "min_p", "num_prompt_log_probs",
    "finish_reason", "stop_reason", "top_log_probs_ids", "top_log_probs",
    "prompt_log_probs", "prompt_log_probs_ranks", "prompt_top_log_probs_ids", "prompt_top_log_probs",
}  # fmt: skip


def configs_of(target: Path, options: ServerOptions) -> dict[str, model_config_pb2.ModelConfig]:
    materialise(target, Path('/engines/with "quotes"'), 32, options)
    return {
        path.name: text_format.Parse((path / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
        for path in target.iterdir()
    }


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, model_config_pb2.ModelConfig]:
    return configs_of(tmp_path_factory.mktemp("run") / "models", ServerOptions())


def described(tensors) -> dict:
    names = model_config_pb2.DataType.Name
    return {t.name: (names(t.data_type).removeprefix("TYPE_"), list(t.dims)) for t in tensors}


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("kind", ["input", "output"])
def test_tensors_are_those_of_the_contract(configs, model: str, kind: str) -> None:
    both = CONTRACT["models"][model][f"{kind}s"] + (EARLIER[model] if kind == "input" else [])
    expected = {t["name"]: (t["datatype"], t["dims"]) for t in both}
    found = described(getattr(configs[model], kind))
    left = {name: found[name] for name in found if name not in OWN}
    assert left == expected, "an input or output that TensorRT-LLM lacks has its name in OWN"
    if kind == "input":
        optional = {t["name"] for t in both if t.get("optional", True)}
        assert {t.name for t in configs[model].input if t.optional} - OWN == optional


@pytest.mark.parametrize("model", ["preprocessing", "postprocessing"])
def test_names_of_the_text_models(configs, model: str) -> None:
    contract = CONTRACT["models"][model]
    earlier = {t["name"] for t in EARLIER.get(model, ())}
    assert {*contract["inputs"], *earlier} <= set(described(configs[model].input))
    assert set(contract["outputs"]) <= set(described(configs[model].output))


def test_every_text_input_has_a_way_to_the_engine(configs) -> None:
    """Under its own name or the one that TensorRT-LLM's ensemble maps it to; what is not offered is refused by name."""
    engine = set(described(configs["tensorrt_llm"].input))
    for model in ("ensemble", "tensorrt_llm_bls"):
        for name in {t.name for t in configs[model].input} - set(TO_PREPROCESSING) - set(NOT_OFFERED):
            assert TO_ENGINE.get(name, name) in engine
    assert set(FROM_PREPROCESSING) <= set(described(configs["preprocessing"].output))
    assert set(FROM_PREPROCESSING.values()) <= engine
    for ensemble_name, name in CONTRACT["ensemble_renames"].items():
        step = FROM_PREPROCESSING.get(TO_PREPROCESSING.get(ensemble_name, ""))
        assert name in (step, TO_ENGINE.get(ensemble_name))


def test_batching_decoupling_and_parameters(configs) -> None:
    assert {config.max_batch_size for config in configs.values()} == {32}
    assert configs["tensorrt_llm"].model_transaction_policy.decoupled
    parameters = configs["tensorrt_llm"].parameters
    assert Path(parameters["gpt_model_path"].string_value).readlink() == Path('/engines/with "quotes"')
    assert parameters["exclude_input_in_output"].string_value == "true"
    assert parameters.keys() - {"run_dir"} <= set(CONTRACT["parameters"])
    assert configs["postprocessing"].instance_group[0].count == 1


def test_one_response_a_request(configs, tmp_path: Path) -> None:
    """No model is decoupled, which Triton's infer() asks for; names and tensors are the same."""
    single = configs_of(tmp_path / "models", ServerOptions(decoupled=False))
    assert not any(config.model_transaction_policy.decoupled for config in single.values())
    for name, config in configs.items():
        assert config.model_transaction_policy.decoupled == (name not in ("preprocessing", "postprocessing"))
        for field in ("name", "input", "output"):
            assert getattr(single[name], field) == getattr(config, field)


def test_models_find_modules_where_the_server_did(tmp_path: Path) -> None:
    """Python in the stubs may leave out PYTHONPATH, as `-I` does."""
    configs_of(tmp_path / "models", ServerOptions())
    for file in (tmp_path / "models").glob("*/1/model.py"):
        first = file.read_text().partition('"""')[0] + "import kvforge; print(kvforge.__file__)"
        told = subprocess.run([sys.executable, "-I", "-S", "-c", first], cwd=tmp_path, capture_output=True, text=True)
        assert told.stdout.strip() == kvforge.__file__, told.stderr


def test_every_input_has_one_fate() -> None:
    names = {t["name"] for t in CONTRACT["models"]["tensorrt_llm"]["inputs"]}
    names |= {tensor["name"] for tensor in EARLIER["tensorrt_llm"]}
    fates = [SUPPORTED, set(WITHOUT_EFFECT), set(UNSUPPORTED), set(ALIASES)]
    assert names <= set.union(*map(set, fates))
    assert sum(len(fate & names) for fate in fates) == len(names)


def test_names_of_earlier_releases() -> None:
    seed, tokens = np.array([[7]], np.uint64), np.array([[3]], np.int32)
    given = {"random_seed": seed, "min_length": tokens, "temperature": tokens}
    found = with_todays_names(given)
    assert found == {"seed": seed, "min_tokens": tokens, "temperature": tokens} and "random_seed" in given
    with refused("'random_seed' and 'seed' are the same"):
        with_todays_names({"random_seed": seed, "seed": seed})


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_inputs_are_refused_by_name_unless_neutral(name: str) -> None:
    asking = np.array([[b"x"]], dtype=object) if "text" in name else np.array([[7] * (1 + UNSUPPORTED[name].ignored)])
    with refused(name):
        refuse_unsupported(name, asking)
    refuse_unsupported(name, np.zeros((1, 0)))
    refuse_unsupported(name, asking[:, : UNSUPPORTED[name].ignored])
    for value in UNSUPPORTED[name].neutral:
        refuse_unsupported(name, np.array([[value]]))
