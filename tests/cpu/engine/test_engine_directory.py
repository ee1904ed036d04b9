"""Loading an engine: intact, foreign, damaged; what it allocates; what one step runs."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvforge.cli import main
from kvforge.common.errors import EngineError
from kvforge.manifest import Manifest, load_manifest, save_manifest, sha256_of, verify_files
from kvforge.runtime.sessions.cpu import CpuSession
from kvforge.runtime.sessions.inputs import LowerStep, UpperStep
from kvforge.runtime.sessions.session import load_session
from tests.support.models.engines import SWIFTKV, SWIFTKV_FP8, SWIFTKV_INT4
from tests.support.models.shelf import EngineShelf
from tests.support.sessions.fake import changed


@pytest.fixture
def engine(engines: EngineShelf, tmp_path: Path) -> Path:
    """A private copy of the shared SwiftKV engine, to be damaged."""
    return Path(shutil.copytree(engines.engine(SWIFTKV), tmp_path / "engine"))


def change_manifest(**changes: object) -> Callable[[Path], None]:
    return lambda engine: save_manifest(changed(load_manifest(engine), **changes), engine)


def edit_json(edit: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(engine: Path) -> None:
        data = json.loads((engine / "engine.json").read_text())
        edit(data)
        (engine / "engine.json").write_text(json.dumps(data))

    return apply


def replace_file(name: str, content: bytes) -> Callable[[Path], None]:
    """Change a file and its recorded hash, so that only its reader can find the fault."""

    def apply(engine: Path) -> None:
        manifest = load_manifest(engine)
        (engine / name).write_bytes(content)
        files = manifest.files | {name: sha256_of(engine / name)}
        save_manifest(dataclasses.replace(manifest, files=files), engine)

    return apply


def drop_rows(path: Path) -> None:
    """Keep every tensor's name but only its first row."""
    save_file({name: tensor[:1].clone() for name, tensor in load_file(path).items()}, path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda e: (e / "engine.json").unlink(), "is not an engine directory"),
    "a checkpoint": (
        lambda e: (e / "engine.json").rename(e / "config.json"),
        "is not an engine directory but a checkpoint; make one of it with: kvforge build ",
    ),
    "manifest is no JSON": (lambda e: (e / "engine.json").write_text("]"), "is damaged"),
    "manifest is a list": (lambda e: (e / "engine.json").write_text("[]"), "engine schema None"),
    "another schema": (edit_json(lambda d: d.update(schema_version=99)), "engine schema 99"),
    "field missing": (edit_json(lambda d: d["model"].pop("cut")), "lacks cut"),
    "field unknown": (edit_json(lambda d: d.update(colour="red")), "unknown field colour"),
    "impossible size": (edit_json(lambda d: d.update(page_size=0)), "impossible values"),
    "size beyond 32 bits": (edit_json(lambda d: d.update(max_num_tokens=2**63)), "impossible values"),
    "half a character": (edit_json(lambda d: d.update(target="\ud800")), "impossible values"),
    "impossible cut": (edit_json(lambda d: d["model"].update(cut=9)), "impossible values"),
    "field of wrong type": (edit_json(lambda d: d.update(isa=None)), "impossible values"),
    "list of wrong type": (edit_json(lambda d: d["model"].update(eos_token_ids=["a"])), "impossible values"),
    "flag of wrong type": (edit_json(lambda d: d["model"].update(qkv_bias=1)), "impossible values"),
    "a token beyond the vocabulary": (edit_json(lambda d: d.update(special_tokens=[320])), "impossible values"),
    "scales of wrong type": (edit_json(lambda d: d.update(kv_scales=[[1.0, "a"]])), "impossible values"),
    "scales without a format": (edit_json(lambda d: d.update(kv_scales=[[1.0, 1.0]] * 4)), "impossible values"),
    "a scale too few": (
        edit_json(lambda d: d.update(kv_dtype="fp8_static", kv_scales=[[1.0, 1.0]] * 3)),
        "impossible values",
    ),
    "a scale of zero": (
        edit_json(lambda d: d.update(kv_dtype="fp8_static", kv_scales=[[1.0, 0.0]] * 4)),
        "impossible values",
    ),
    "unknown weight format": (edit_json(lambda d: d.update(weight_dtype="int3")), "impossible values"),
    "unknown cache format": (edit_json(lambda d: d.update(kv_dtype="fp4")), "impossible values"),
    "file missing": (lambda e: (e / "rank0" / "lower.pt2").unlink(), "lacks rank0/lower.pt2"),
    "another torch": (change_manifest(torch_version="1.0"), "built with torch 1.0"),
    "another CPU": (change_manifest(isa=("x86_64", "avx9000")), "a CPU with avx9000"),
    "another target": (change_manifest(target="tpu"), "built for target tpu"),
    "other operators": (change_manifest(operators={"paged_attention": 0}), "other versions of operators"),
    "operators from elsewhere": (
        change_manifest(operators={"scaled_add": 1}),
        "put their folder on $KVFORGE_PLUGIN_PATH",
    ),
    "weights truncated": (lambda e: (e / "rank0" / "weights.safetensors").write_bytes(b"\0" * 20), "is damaged"),
    "weights of another model": (lambda e: drop_rows(e / "rank0" / "weights.safetensors"), "another engine's"),
    "graph of another engine": (lambda e: shutil.copy(e / "rank0/lower.pt2", e / "rank0/upper.pt2"), "was changed"),
    "graph is no package": (replace_file("rank0/upper.pt2", b"PK"), "cannot be loaded"),
    "operators are no library": (replace_file("rank0/operators.so", b"x"), "operator library"),
    "tokenizer changed": (lambda e: (e / "tokenizer" / "tokenizer.json").write_text("{}"), "was changed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_engine_is_refused(damage: str, engine: Path) -> None:
    harm, sentence = DAMAGES[damage]
    harm(engine)
    with pytest.raises(EngineError) as error:
        load_session(engine, load_manifest(engine))
    message = str(error.value)
    assert sentence in message and message.endswith(".") and "\n" not in message
    assert "build" in message or "not run" in message


def test_inspect_prints_and_verifies(engine: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(engine), "--verify"]) == 0
    assert "prompt tokens stop at layer 2" in capsys.readouterr().out
    assert main(["inspect", str(engine), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["owners"] == [0, 1, 2, 4] and shown["cut"] == 2
    with (engine / "rank0" / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert main(["inspect", str(engine), "--verify"]) == 1
    assert "weights.safetensors was changed" in capsys.readouterr().err


def test_weight_bytes_are_those_of_the_matrices_without_the_lookup(engines: EngineShelf) -> None:
    """The untied model's embedding is left out; float32 engines store what the graphs name."""
    engine = engines.engine(SWIFTKV)
    manifest = load_manifest(engine)
    with safe_open(engine / "rank0" / "weights.safetensors", framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and name != "embed.weight"]
    assert manifest.weight_bytes == 4 * sum(math.prod(shapes[name]) for name in matrices)
    assert dataclasses.replace(manifest, weight_dtype="int8").weight_bytes * 4 == manifest.weight_bytes


def test_inspect_says_how_the_cache_stores_numbers(
    engines_compiled_with_full: EngineShelf, capsys: pytest.CaptureFixture
) -> None:
    engines = engines_compiled_with_full
    assert main(["inspect", str(engines.engine(SWIFTKV))]) == 0
    shown = capsys.readouterr().out
    assert "KV format   float32\n" in shown and "no drafts" in shown
    assert main(["inspect", str(engines.engine(SWIFTKV_FP8))]) == 0
    shown = capsys.readouterr().out
    assert "fp8, one float32 scale per token and head (64 of the bytes per token)" in shown
    assert "320 bytes per token" in shown and "4 drafts a sequence" in shown
    assert main(["inspect", str(engines.engine(SWIFTKV_INT4))]) == 0
    shown = capsys.readouterr().out
    assert "int4, one float32 scale per token and head (64 of the bytes per token)" in shown
    assert "192 bytes per token" in shown


def test_a_session_needs_nothing_outside_its_directory(engine: Path, tmp_path: Path) -> None:
    moved = engine.rename(tmp_path / "elsewhere")
    verify_files(moved, load_manifest(moved))
    load_session(moved, load_manifest(moved))


def test_loading_leaves_no_temporary_files(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    session = load_session(engine, load_manifest(engine))
    assert list(folder.iterdir()) == []
    assert session.allocate_pools(1)[0][0].sum() == 0


def test_what_steps_free_is_kept(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("kvforge.runtime.sessions.cpu.keep_freed_memory", asked.append)
    load_session(engine, load_manifest(engine))
    assert asked == [2**28]


def test_engines_load_from_several_threads(engine: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        sessions = list(pool.map(lambda _: load_session(engine, load_manifest(engine)), range(8)))
    assert len({id(session) for session in sessions}) == 8


def test_pools_are_one_allocation_of_the_formulas_size(engine: Path) -> None:
    manifest = load_manifest(engine)
    pools = load_session(engine, manifest).allocate_pools(num_pages=6)
    expected = (
        2
        * len(manifest.model.owners)
        * 6
        * manifest.page_size
        * manifest.model.num_kv_heads
        * manifest.model.head_dim
        * 4
    )
    storages = {tensor.untyped_storage().data_ptr() for pool in pools for tensor in pool}
    assert len(storages) == 1 and len(pools) == 4 < manifest.model.num_layers
    assert pools[0][0].untyped_storage().nbytes() == expected == 6 * manifest.page_bytes
    assert manifest.kv_bytes_per_token * manifest.page_size == manifest.page_bytes


def test_both_graphs_share_one_copy_of_the_weights(engine: Path) -> None:
    """Weights are one allocation, and what is written there both graphs see: they have no copies."""
    session = load_session(engine, load_manifest(engine))
    assert isinstance(session, CpuSession)
    assert len({weight.untyped_storage().data_ptr() for weight in session._weights.values()}) == 1
    pools = session.allocate_pools(1)
    one, starts = torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    zero, table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        hidden = session.lower(LowerStep(one, zero, zero, starts, one, table), pools)
        return hidden, session.upper(UpperStep(torch.ones_like(hidden), zero, starts, zero, one, table), pools)

    assert all(result.any() for result in step())
    for weight in session._weights.values():
        weight.zero_()
    assert not any(result.any() for result in step())


@pytest.fixture
def swiftkv_manifest(engines: EngineShelf) -> Manifest:
    return load_manifest(engines.engine(SWIFTKV))


def test_prefill_flops_follow_the_cut_and_the_groups(swiftkv_manifest: Manifest) -> None:
    """Table 1's structure: q, o, MLP and attention scale with k/L, K and V with the owners."""
    plain = changed(swiftkv_manifest, cut=5, group_size=1)
    cut = changed(swiftkv_manifest, cut=2, group_size=1)
    hidden, kv = 64, 2 * 16
    key_value = 2 * hidden * 2 * kv
    full, half = plain.prefill_flops_per_token(100), cut.prefill_flops_per_token(100)
    assert half - 5 * key_value == pytest.approx((full - 5 * key_value) * 2 / 5)
    assert half - swiftkv_manifest.prefill_flops_per_token(100) == key_value
    windowed = changed(plain, layer_windows=(10,) * 5)
    mean_keys = sum(min(position + 1, 10) for position in range(100)) / 100
    saved = 5 * 4 * 64 * (50.5 - mean_keys)
    assert full - windowed.prefill_flops_per_token(100) == pytest.approx(saved)


def test_weights_are_exactly_those_of_the_graphs(engines: EngineShelf) -> None:
    """The teacher's q, k and v above the cut are not in the engine."""
    with safe_open(engines.engine(SWIFTKV) / "rank0" / "weights.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes["single_input.kv.weight"] == (2 * 2 * 32, 64)
    assert shapes["layers.1.qkv.weight"] == (64 + 2 * 32, 64)
    assert shapes["layers.2.q.weight"] == (64, 64) and "layers.2.qkv.weight" not in shapes
    assert sum(torch.Size(shape).numel() for name, shape in shapes.items() if name != "inverse_frequencies") == (
        load_manifest(engines.engine(SWIFTKV)).num_parameters
    )
