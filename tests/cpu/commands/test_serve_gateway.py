"""Whether `kvforge serve` has an OpenAI gateway where nobody says so, and how a key comes to it."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from kvforge.cli import make_parser
from kvforge.commands.serve_doors import choose_doors
from kvforge.commands.serve_gateway import choose_gateway, gateway_options
from kvforge.common.errors import KvforgeError
from kvforge.gateway.http.auth import ENVIRONMENT
from kvforge.manifest import TOKENIZER_DIR, load_manifest, save_manifest
from tests.cpu.gateway.engine_files import write_engine_files


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENVIRONMENT, "x")  # so that it is as before afterwards
    monkeypatch.delenv(ENVIRONMENT)
    return write_engine_files(tmp_path / "tiny")


def chosen(engine: Path | str, *options: str) -> tuple[bool, str | None]:
    """Whether there is a gateway, and why not where nobody said so."""
    args = make_parser().parse_args(["serve", str(engine), *options])
    reason = choose_gateway(args)
    return args.openai, reason


def test_it_is_there_where_there_are_texts_and_streams(engine: Path) -> None:
    assert chosen(engine) == (True, None)
    assert chosen("owner/name") == (True, None)
    assert chosen(engine, "--no-openai") == (False, None)
    assert chosen(engine, "--no-decoupled") == (False, "its answers are streamed, and Triton has --no-decoupled")
    one_response = dataclasses.replace(load_manifest(engine), decoupled_mode=False)
    save_manifest(one_response, engine)
    assert not chosen(engine)[0] and chosen(engine, "--decoupled") == (True, None)
    with pytest.raises(KvforgeError, match="--openai streams every answer from the engine"):
        chosen(engine, "--openai")


def test_an_engine_without_a_tokenizer_has_none(engine: Path) -> None:
    shutil.rmtree(engine / TOKENIZER_DIR)
    assert chosen(engine) == (False, "the engine has no tokenizer")
    with pytest.raises(KvforgeError, match="--keep-alive is for the OpenAI gateway: there is none, as the engine has"):
        chosen(engine, "--keep-alive", "3")


def test_a_key_of_the_command_line_is_not_on_the_gateways(engine: Path) -> None:
    chosen(engine, "--api-key", "secret")
    assert os.environ[ENVIRONMENT] == "secret"
    with pytest.raises(KvforgeError, match="are both given"):
        chosen(engine, "--api-key", "other")
    with pytest.raises(KvforgeError, match="only the OpenAI gateway has keys: leave out --no-openai"):
        chosen(engine, "--no-openai")


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused(engine: Path, key: str) -> None:
    with pytest.raises(KvforgeError, match="--api-key is empty"):
        chosen(engine, "--api-key", key)


def test_a_model_may_have_several_names(engine: Path) -> None:
    args = make_parser().parse_args(["serve", str(engine), "--served-model-name", "a", "b", "--alias", "a"])
    choose_gateway(args)
    assert gateway_options(args, choose_doors(args, has_key=False), "other").model_names == ("a", "b")
    args = make_parser().parse_args(["serve", str(engine)])
    choose_gateway(args)
    assert gateway_options(args, choose_doors(args, has_key=False), "other").model_names == ("other",)


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--max-n", "0", "--max-n is 0: give 1 or more"),
        ("--max-answer-bytes", "-5", "--max-answer-bytes is -5: give 1 or more"),
        ("--request-timeout", "nan", "--request-timeout is nan: give a number of seconds above 0"),
        ("--keep-alive", "inf", "--keep-alive is inf: give a number of seconds above 0"),
        ("--write-timeout", "0", "--write-timeout is 0.0: give a number of seconds above 0"),
        ("--served-model-name", " ", "a name of --served-model-name is empty"),
    ],
)
def test_limits_that_let_nothing_through_are_refused_before_an_engine_is_built(
    option: str, value: str, sentence: str
) -> None:
    with pytest.raises(KvforgeError, match=sentence):
        chosen("owner/name", f"{option}={value}")
