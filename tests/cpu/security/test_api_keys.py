"""Comparing API keys takes as long whatever is shown: every key, through hmac.compare_digest, on equal lengths."""

import hmac
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the gateway's packages")

from kvforge.gateway.auth import ApiKeys

KEYS = ["sk-first-key", "sk-2", "sk-" + "third" * 20]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Lengths of what is compared."""
    lengths: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def noted(a: bytes, b: bytes) -> bool:
        lengths.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    return lengths


@pytest.mark.parametrize("shown", [*KEYS, "", "s", "sk-first-ke", "sk-first-keyx", "x" * 100000, "\udcff", "é"])
def test_every_key_is_compared_at_its_full_length(shown: str, compared: list[tuple[int, int]]) -> None:
    assert ApiKeys(KEYS).allow(f"Bearer {shown}") == (shown in KEYS)
    assert len(compared) == len(KEYS)
    assert len({length for pair in compared for length in pair}) == 1


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Basic sk-2", "sk-2", "Bearer sk-2 sk-2", "Bearer\tsk-2", "Bearersk-2"]
)
def test_other_headers_show_no_key(header: str) -> None:
    assert not ApiKeys(KEYS).allow(header)


def test_keys_are_kept_as_digests(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(KEYS))
    keys = ApiKeys.read(file)
    assert not any(key in repr(vars(keys)) or key in repr(keys) for key in KEYS)
