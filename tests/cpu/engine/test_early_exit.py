"""The early exit of compiled engines against the plain-torch reference, and engines without one."""

import json
import shutil
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvforge.cli import main
from kvforge.common.errors import CheckpointError, EngineError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.compiler.export import export_lower, export_upper
from kvforge.compiler.options import resolve
from kvforge.costs.weights import num_parameters
from kvforge.manifest import WEIGHTS_FILE, load_manifest
from kvforge.planning.cuts import without_cut
from kvforge.planning.load import load_subject
from kvforge.runtime.sessions.cpu import CpuSession
from kvforge.runtime.sessions.cuda import CudaSession, activation_bytes
from kvforge.runtime.sessions.session import Session, load_session
from model_defs import load_config
from model_defs.reference import reference_early_exit, reference_logits
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.models.engines import EARLY_EXIT, SWIFTKV, EngineSpec
from tests.support.models.shelf import EngineShelf
from tests.support.rounding import assert_near, config_of, model_error, relative_error
from tests.support.schedules.packed_steps import packed_steps
from tests.support.sessions.fake import changed

CASES = {
    "llama, groups of 2": EARLY_EXIT,
    "qwen3, groups of 3, tied embeddings": EngineSpec(
        "qwen3", 1, 3, early_exit=True, model=(("num_hidden_layers", 4), ("tie_word_embeddings", True))
    ),
    "mistral": EngineSpec("mistral", 2, early_exit=True, model=(("num_hidden_layers", 3), ("sliding_window", 24))),
    "qwen2": EngineSpec("qwen2", 1, early_exit=True, model=(("num_hidden_layers", 2),)),
}
NUM_PAGES, TOKENS = 40, 57


@lru_cache
def session_of(engine: Path) -> Session:
    return load_session(engine, load_manifest(engine))


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in (57, 1, 34)]


@pytest.mark.with_full(case=[case for case, spec in CASES.items() if spec != EARLY_EXIT])
@pytest.mark.parametrize("case", CASES)
def test_both_heads_equal_the_reference(case: str, engines: EngineShelf) -> None:
    """Steps of several sequences with no, one and many survivors; the exit leaves the hidden state and caches alone."""
    engine, checkpoint = engines.engine(CASES[case]), engines.checkpoint(CASES[case])
    config, weights = config_of(checkpoint), load_weights(checkpoint)
    sequences = prompts(config.vocab_size)
    exits = [reference_early_exit(config, weights, torch.tensor(tokens)) for tokens in sequences]
    full_model = [reference_logits(config, weights, torch.tensor(tokens)) for tokens in sequences]
    session, rounding = session_of(engine), model_error(config, TOKENS)
    counts = set()
    for seed in range(3):
        pools = session.allocate_pools(NUM_PAGES)
        for step in packed_steps(sequences, session.manifest.page_size, NUM_PAGES, seed):
            hidden = session.lower(step.lower, pools)
            logits = session.early_exit(hidden, step.survivor_index)
            assert logits.dtype == torch.float32 and logits.shape == (len(step.survivors), config.vocab_size)
            counts.add(min(len(step.survivors), 4))
            if step.survivors:
                rows = [torch.stack([x[s][p] for s, p in step.survivors]) for x in (exits, full_model)]
                assert_near(logits, rows[0], rounding)
                assert_near(session.upper(step.upper(hidden), pools), rows[1], rounding)
    assert counts >= {0, 1, 4}
    assert relative_error(torch.cat(exits), torch.cat(full_model)) > 0.1


def test_what_the_engine_says_of_its_exit(engines: EngineShelf, capsys: pytest.CaptureFixture[str]) -> None:
    engine, config = engines.engine(EARLY_EXIT), load_config(hf_config(engines))
    manifest = load_manifest(engine)
    assert manifest.model.early_exit and manifest.graphs == ("lower", "upper", "early_exit")
    assert (engine / "rank0" / "early_exit.pt2").is_file()
    weights = load_file(engine / "rank0" / "weights.safetensors")
    assert weights["lm_head_early_exit.weight"].shape == (320, 64) and weights["norm_early_exit.weight"].shape == (64,)
    assert manifest.num_parameters == sum(t.numel() for n, t in weights.items() if n != "inverse_frequencies")
    assert main(["inspect", str(engine)]) == 0
    assert "prompt tokens stop at layer 2, early exit there\n" in capsys.readouterr().out
    without = changed(manifest, early_exit=False)
    assert activation_bytes(manifest) > activation_bytes(without)
    # The head lies in memory, and is none of the model that is compared with others.
    plain = num_parameters(without_cut(config))
    assert num_parameters(without_cut(manifest.model)) == plain
    assert num_parameters(manifest.model) == manifest.num_parameters
    assert num_parameters(manifest.model) - num_parameters(changed(manifest, early_exit=False).model) == 321 * 64
    for path in (engine, checkpoint(engines)):
        assert num_parameters(without_cut(load_subject(str(path)).model)) == plain


def checkpoint(engines: EngineShelf) -> Path:
    return engines.checkpoint(EARLY_EXIT)


def hf_config(engines: EngineShelf) -> dict:
    return json.loads((checkpoint(engines) / "config.json").read_text())


def test_an_engine_without_the_head_says_so(engines: EngineShelf, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engines.engine(SWIFTKV)
    assert load_manifest(engine).graphs == ("lower", "upper")
    assert main(["inspect", str(engine)]) == 0
    assert "early exit" not in capsys.readouterr().out
    with pytest.raises(EngineError, match=r"no early exit; build it from .* without --no-early-exit\.$"):
        session_of(engine).early_exit(torch.zeros(3, 64), torch.zeros(1, dtype=torch.int32))


def test_the_other_graphs_are_the_same_with_and_without_it(engines: EngineShelf) -> None:
    hf = hf_config(engines)
    programs = []
    for early_exit in (True, False):
        config = load_config(hf | {"early_exit": early_exit})
        options = resolve(BuildOptions(page_size=8), config, "F32")
        programs.append([export(config, options).program for export in (export_lower, export_upper)])
    for one, other in zip(*programs, strict=True):
        assert str(one) == str(other) and one.state_dict.keys() == other.state_dict.keys()


def test_the_head_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not only its graph: its weights, too."""
    pytest.importorskip("onnxscript")
    monkeypatch.setattr("kvforge.compiler.onnx_export.write_onnx", lambda *arguments: arguments[3].touch())
    monkeypatch.setattr("kvforge.compiler.targets.tensorrt.builds_plans", lambda: False)
    path = make_checkpoint(tmp_path / "model", cut=1, early_exit=True, num_hidden_layers=2)
    kept = build_engine(path, tmp_path / "kept", BuildOptions(target="tensorrt"))
    arguments = ["build", str(path), "-o", str(tmp_path / "left"), "--target", "tensorrt", "--no-early-exit", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["early_exit"] is False
    left = load_manifest(tmp_path / "left")
    assert load_manifest(tmp_path / "kept") == kept and kept.model.early_exit and not left.model.early_exit
    assert kept.num_parameters - left.num_parameters == 321 * 64
    assert kept.files.keys() - left.files.keys() == {"rank0/early_exit.onnx"}


def test_a_checkpoint_that_lacks_the_head_it_promises_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", cut=1, num_hidden_layers=2)
    hf = json.loads((path / "config.json").read_text())
    for extra, sentence in (
        ({"early_exit": True}, "norm_early_exit.weight"),
        ({"early_exit": "yes"}, "early_exit is 'yes' in config.json; it must be true or false."),
        ({"early_exit": True, "num_key_value_layers": 2}, "no cut to exit at"),
    ):
        (path / "config.json").write_text(json.dumps(hf | extra))
        with pytest.raises(CheckpointError) as error:
            build_engine(path, tmp_path / "engine")
        assert sentence in str(error.value) and not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda d: d.pop("model") and d.update(schema_version=2), "has engine schema 2, this kvforge reads 7;"),
        (lambda d: d.update(schema_version=2), "has engine schema 2, this kvforge reads 7; rebuild the engine"),
        (lambda d: d["model"].update(early_exit=1), "impossible values"),
        (lambda d: d["model"].update(cut=5), "impossible values"),
    ],
)
def test_old_and_impossible_manifests_are_refused(edit, sentence: str, engines: EngineShelf, tmp_path: Path) -> None:
    engine = Path(shutil.copytree(engines.engine(EARLY_EXIT), tmp_path / "engine"))
    data = json.loads((engine / "engine.json").read_text())
    edit(data)
    (engine / "engine.json").write_text(json.dumps(data))
    with pytest.raises(EngineError) as error:
        load_manifest(engine)
    assert sentence in str(error.value)


def test_weights_without_the_head_do_not_fit_an_engine_with_it(engines: EngineShelf, tmp_path: Path) -> None:
    engine = Path(shutil.copytree(engines.engine(EARLY_EXIT), tmp_path / "engine"))
    shutil.copy(engines.engine(SWIFTKV) / WEIGHTS_FILE, engine / WEIGHTS_FILE)
    with pytest.raises(EngineError, match="damaged or another engine's"):
        load_manifest(engine)


def test_the_cuda_session_stages_it_as_the_cpu_session_runs_it(engines: EngineShelf) -> None:
    """On the CPU, with a CPU engine's graphs inside: before ``upper``, after it, and for no survivor."""
    cpu = session_of(engines.engine(EARLY_EXIT))
    assert isinstance(cpu, CpuSession)
    graphs = {"lower": cpu._lower, "upper": cpu._upper, "early_exit": cpu._early_exit}
    assert graphs["early_exit"] is not None
    session = CudaSession(cpu.manifest, {}, graphs, torch.device("cpu"))
    rounding = model_error(config_of(engines.checkpoint(EARLY_EXIT)), TOKENS)
    pools, others = session.allocate_pools(NUM_PAGES), cpu.allocate_pools(NUM_PAGES)
    for step in packed_steps(prompts(320), cpu.manifest.page_size, NUM_PAGES, seed=2):
        hidden, expected = session.lower(step.lower, pools), cpu.lower(step.lower, others)
        first = session.early_exit(hidden, step.survivor_index)
        if step.survivors:
            logits = session.upper(step.upper(hidden), pools)
            assert_near(logits, cpu.upper(step.upper(expected), others), rounding)
        again = session.early_exit(hidden, step.survivor_index)
        assert torch.equal(first, again)
        assert_near(first, cpu.early_exit(expected, step.survivor_index), rounding)
    del graphs["early_exit"]
    with pytest.raises(EngineError, match="no early exit"):
        CudaSession(cpu.manifest, {}, graphs, torch.device("cpu")).early_exit(hidden, step.survivor_index)
