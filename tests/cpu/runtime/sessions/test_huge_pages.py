"""Memory of large pages, and the weights and pools in it."""

import gc
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvforge.common.errors import EngineError
from kvforge.manifest import WEIGHTS_FILE
from kvforge.runtime import LLMEngine, engine
from kvforge.runtime.sessions import huge_pages
from kvforge.runtime.sessions.aot_package import load_weights
from kvforge.runtime.sessions.huge_pages import ALIGNMENT, huge_page_memory
from kvforge.runtime.sessions.pools import allocate_pools
from tests.support.sessions.fake import fake_manifest


def test_memory_is_zeroed_writable_and_lives_as_long_as_its_views():
    view = huge_page_memory(5 << 20)[3 << 20 :]
    gc.collect()
    assert view.numel() == 2 << 20 and not view.any()
    view.fill_(7)
    assert view.sum() == 7 * (2 << 20)
    assert huge_page_memory(0).numel() == 0


def test_weights_are_copied_bit_for_bit_and_aligned(tmp_path):
    weights = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16),
        "b": torch.randint(-128, 128, (7,), dtype=torch.int8),
        "c": torch.tensor(2.5),
        "d": torch.randn(1, 33),
    }
    (tmp_path / WEIGHTS_FILE).parent.mkdir()
    save_file(weights, tmp_path / WEIGHTS_FILE)
    loaded = load_weights(tmp_path)
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight) and loaded[name].dtype == weight.dtype
        assert loaded[name].data_ptr() % ALIGNMENT == 0


def test_the_file_is_not_resident_beside_the_copy(tmp_path):
    file = tmp_path / WEIGHTS_FILE
    file.parent.mkdir()
    save_file({name: torch.ones(1 << 20) for name in "abcd"}, file)
    loaded = load_weights(tmp_path)
    assert all(tensor.min() == 1 for tensor in loaded.values())
    assert str(file) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("num_bytes", [1 << 62, 1 << 70])
def test_memory_that_is_not_there_is_said_so(num_bytes, tmp_path, monkeypatch):
    with pytest.raises(MemoryError):
        huge_page_memory(num_bytes)
    manifest = fake_manifest(head_dim=1 << 30)
    session = types.SimpleNamespace(manifest=manifest, allocate_pools=lambda count, *_: allocate_pools(manifest, count))
    with pytest.raises(
        EngineError, match=r"^the KV cache of .* GiB is more than the .* that are free; lower num_pages\.$"
    ):
        LLMEngine(session=session, num_pages=1 << 20)
    monkeypatch.setattr(engine, "available_memory_bytes", lambda: 0)
    with pytest.raises(EngineError, match=r"^the KV cache of .* GiB cannot be allocated; lower --kv-cache-gib\.$"):
        LLMEngine(session=session, num_pages=1 << 20)
    (tmp_path / WEIGHTS_FILE).parent.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / WEIGHTS_FILE)
    monkeypatch.setattr(huge_pages, "huge_page_memory", lambda _: huge_page_memory(num_bytes))
    with pytest.raises(EngineError, match=r"^there is no memory for .*weights"):
        load_weights(tmp_path)
