"""Where a gateway listens, and what it says when other machines need no key."""

import logging
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.gateway.http.server import listen, make_server
from kvforge.gateway.options import GatewayOptions

WARNING = "other machines may generate here without a key"


@pytest.mark.parametrize(
    ("address", "key", "exit_with_parent", "is_said"),
    [
        ("0.0.0.0", None, False, True),
        ("0.0.0.0", "secret", False, False),
        ("127.0.0.1", None, False, False),
        ("localhost", None, False, False),
        ("0.0.0.0", None, True, False),  # kvforge serve says it
    ],
)
def test_a_gateway_without_a_key_says_so(
    engine_files: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, address: str,
    key: str | None, exit_with_parent: bool, is_said: bool,
) -> None:  # fmt: skip
    if key is not None:
        monkeypatch.setenv("KVFORGE_API_KEY", key)
    with caplog.at_level(logging.WARNING):
        make_server(GatewayOptions(engine=engine_files, address=address, exit_with_parent=exit_with_parent))
    assert (WARNING in caplog.text) == is_said


def test_a_wrong_address_is_refused_before_the_engine_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(KvforgeError, match=r"^--address '203\.0\.113\.9' is not an address of this machine"):
        make_server(GatewayOptions(engine=tmp_path, address="203.0.113.9"))


def test_an_empty_key_is_refused(engine_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFORGE_API_KEY", "")
    with pytest.raises(KvforgeError, match="is set and empty"):
        make_server(GatewayOptions(engine=engine_files))


@pytest.mark.parametrize("address", ["localhost", "::1"])
def test_it_listens_at_names_and_at_ipv6(address: str) -> None:
    try:
        sock = listen(GatewayOptions(address=address, port=0))
    except KvforgeError:
        pytest.skip(f"this machine has no {address}")
    with sock:
        assert sock.getsockname()[0] in ("127.0.0.1", "::1")
