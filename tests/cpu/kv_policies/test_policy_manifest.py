"""The policy in ``engine.json``, in ``kvforge inspect`` and at the root of the prefix cache's digests."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvforge.cli import main
from kvforge.common.errors import EngineError
from kvforge.kv_policies import Full
from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.manifest import load_manifest, save_manifest
from kvforge.runtime.scheduling.prefix_cache import PrefixCache
from kvforge.runtime.speculation.config import SpeculativeConfig, check_speculation
from tests.support.sessions.fake import fake_manifest

POLICY = ShadowKV(rank=2, chunk_size=4, sparse_budget=8, num_outlier_chunks=1, num_local_tokens=4)

OTHERS = ({"rank": 1}, {"chunk_size": 2}, {"sparse_budget": 4}, {"num_outlier_chunks": 2}, {"num_local_tokens": 0})
"""Parameters that suit the same model, though not the graphs compiled for ``POLICY``."""

CHANGED = "engine.json was changed or damaged after the build; rebuild the engine with kvforge build."


def write(path: Path, **changes):
    values = {"isa": ("x86-64",), "kv_policy": POLICY.name, "kv_policy_parameters": POLICY.parameters}
    manifest = fake_manifest(**values | changes)
    save_manifest(manifest, path)
    return manifest


def test_round_trip(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    assert load_manifest(tmp_path) == manifest and load_manifest(tmp_path).policy == POLICY
    plain = write(tmp_path, kv_policy="full", kv_policy_parameters={})
    assert load_manifest(tmp_path) == plain and plain.policy == Full() == fake_manifest().policy


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"kv_policy": "quest"}, "impossible values"),
        ({"kv_policy": 3}, "impossible values"),
        ({"kv_policy": "full"}, "impossible values"),
        ({"kv_policy_parameters": {}}, "impossible values"),
        ({"kv_policy_parameters": []}, "impossible values"),
        ({"kv_policy_parameters": POLICY.parameters | {"rank": 0}}, "impossible values"),
        ({"kv_policy_parameters": POLICY.parameters | {"rank": "2"}}, "impossible values"),
        ({"kv_policy_parameters": POLICY.parameters | {"rank": True}}, "impossible values"),
        ({"kv_policy_parameters": POLICY.parameters | {"more": 1}}, "impossible values"),
        ({"kv_policy_parameters": POLICY.parameters | {"rank": 3}}, "impossible values"),
        ({"page_size": 6}, "impossible values"),
        ({"schema_version": 5}, "has engine schema 5, this kvforge reads 7; rebuild the engine with kvforge build."),
        *(({"kv_policy_parameters": POLICY.parameters | other}, CHANGED) for other in OTHERS),
        ({"kv_policy": "full", "kv_policy_parameters": {}}, CHANGED),
        ({"model": fake_manifest(cut=2).model.to_json()}, CHANGED),
        ({"manifest_sha256": "0" * 64}, CHANGED),
    ],
)
def test_damaged_policies_are_refused(damage, message, tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(EngineError, match=message):
        load_manifest(tmp_path)


def test_the_order_of_keys_and_white_space_mean_nothing(tmp_path: Path) -> None:
    manifest, path = write(tmp_path), tmp_path / "engine.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert load_manifest(tmp_path) == manifest


@pytest.mark.parametrize("text", ["[" * 200_000, '{"schema_version": ' + "6" * 5000 + "}", "{", "\udcff"])
def test_what_no_parser_takes_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(EngineError, match=r"engine\.json is damaged \(.*; rebuild the engine"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("field", ["kv_policy", "kv_policy_parameters"])
def test_an_engine_without_its_policy_is_refused(field, tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != field}))
    with pytest.raises(EngineError, match=f"lacks {field}; rebuild"):
        load_manifest(tmp_path)


def test_inspect_shows_policy_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """2 owners of 1 head with 2 float32 numbers, 128 tokens in pages of 4; 31 chunks, 12 compact tokens and a tail of
    4."""
    write(tmp_path)
    device = 2 * (128 * 2 * 4 + 2 * 1 * 2 * 4 + 32 * (2 * 4 + 1) + 4 * 2 + 16 + 16 * 2 * 2 * 4)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kv_policy"], found["kv_policy_parameters"]) == ("shadowkv", POLICY.parameters)
    assert found["sequence_device_bytes"] == device
    assert found["sequence_host_bytes"] == 2 * 128 * 2 * 4
    assert found["sequence_full_bytes"] == 2 * 128 * 2 * 2 * 4
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"KV policy   {POLICY}\n" in text
    assert (
        f"sequence    {device / 1024:.1f} KiB on the device, 2.0 KiB in host memory (in full 4.0 KiB) after a prompt "
        "of 128 tokens\n"
    ) in text


def test_inspect_without_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path, kv_policy="full", kv_policy_parameters={})
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "KV policy   full\n" in text
    assert "sequence    4.0 KiB on the device after a prompt of 128 tokens\n" in text


@pytest.mark.parametrize("max_draft_len", [0, 8])
def test_no_speculation_with_one_query_a_step(max_draft_len: int) -> None:
    config = SpeculativeConfig("ngram", num_speculative_tokens=4)
    values = {"kv_policy": POLICY.name, "kv_policy_parameters": POLICY.parameters}
    with pytest.raises(
        EngineError, match="KV policy shadowkv takes one query per sequence and step, so it verifies no"
    ):
        check_speculation(config, None, fake_manifest(max_draft_len=max_draft_len, **values))
    check_speculation(None, 0.5, fake_manifest(early_exit=True, **values))
    check_speculation(config, None, fake_manifest(max_draft_len=8))


class _Tokens:
    def __init__(self) -> None:
        self.tokens, self.digests = np.arange(8, dtype=np.int32), []


def test_prefixes_are_named_by_policy_and_parameters_too() -> None:
    roots = ("full", str(POLICY), str(ShadowKV()), str(ShadowKV(rank=64)))
    names = [[PrefixCache(4, root).digest(_Tokens(), index) for index in range(2)] for root in roots]
    assert len({name for pair in names for name in pair}) == 2 * len(roots)
    assert names[0] == [PrefixCache(4).digest(_Tokens(), index) for index in range(2)]
    assert names[1] == [PrefixCache(4, str(POLICY)).digest(_Tokens(), index) for index in range(2)]
