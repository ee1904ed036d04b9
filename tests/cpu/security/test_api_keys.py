"""Comparing API keys takes as long whatever is shown: every key, through hmac.compare_digest, on equal lengths."""

import hmac
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the gateway's packages")

from kvforge.common.errors import KvforgeError
from kvforge.gateway.http.auth import ENVIRONMENT, ApiKeys

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


@pytest.mark.parametrize("value", ["", " ", "\t"])
def test_an_empty_variable_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the unset variable of a compose file: the server would be open to everybody."""
    monkeypatch.setenv(ENVIRONMENT, value)
    with pytest.raises(KvforgeError, match=r"^\$KVFORGE_API_KEY is set and empty; give it a key, or unset it to"):
        ApiKeys.read(None)


def test_without_a_variable_there_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert not ApiKeys.read(None) and ApiKeys.read(None).allow("")
    monkeypatch.setenv(ENVIRONMENT, "key")
    assert ApiKeys.read(None) and not ApiKeys.read(None).allow("")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no API key"),
        ("\n", "line 1 of .* is an empty API key"),
        ("\n \n", "line 1 of .* is an empty API key"),
        ("alpha\n\nbeta\n", "line 2 of .* is an empty API key"),
        ("alpha\n\t\n", "line 2 of .* is an empty API key"),
        (None, "cannot be read as API keys"),
    ],
)
def test_key_files_with_empty_keys_are_refused(text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(KvforgeError, match=says) as caught:
        ApiKeys.read(tmp_path / "keys")
    assert "per line" in str(caught.value) and "\n" not in str(caught.value)
