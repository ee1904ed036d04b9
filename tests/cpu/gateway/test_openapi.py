"""/openapi.json and /docs: whole, of this server alone, and open where the server has keys."""

import json
from pathlib import Path

import pytest
from openapi_spec_validator import validate

from kvforge.gateway.http.openapi import BODIES
from tests.cpu.gateway.http_calls import call, post

REQUESTS = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
OTHERS = {"/tokenizer_info", "/v1/models", "/v1/models/{name}", "/ready", "/health", "/version", "/metrics"}


def document(url: str) -> dict:
    return json.loads(call(url, "GET", "/openapi.json").body)


def test_every_path_is_there_with_its_method(url: str) -> None:
    paths = document(url)["paths"]
    assert {path: "".join(each) for path, each in paths.items()} == {
        **dict.fromkeys(BODIES, "post"), **dict.fromkeys(OTHERS, "get")
    }  # fmt: skip
    assert not any("security" in operation for each in paths.values() for operation in each.values())


def test_the_document_is_valid(url: str) -> None:
    validate(document(url))


@pytest.mark.parametrize("path", BODIES)
def test_answers_and_errors_are_as_described(url: str, triton, path: str) -> None:
    found = document(url)
    operation = found["paths"][path]["post"]
    answer = post(url + path, REQUESTS[path])
    assert answer.status == 200
    assert {*operation["responses"]["200"]["content"]["application/json"]["schema"]["required"]} <= {
        *json.loads(answer.body)
    }
    error = post(url + path, {**REQUESTS[path], "colour": "red"})
    reference = operation["responses"][str(error.status)]["content"]["application/json"]["schema"]["$ref"]
    assert found["components"]["schemas"][reference.rpartition("/")[2]]["required"] == [*json.loads(error.body)]


def test_the_page_has_all_of_it_and_nothing_from_elsewhere(url: str) -> None:
    answer = call(url, "GET", "/docs")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert all(f"<h2>POST {path}</h2>" in answer.body for path in BODIES)
    assert "<td>temperature<td>number ≥ 0.0 ≤ 10000.0<td><td>of sampling; 0 takes" in answer.body
    assert not any(word in answer.body for word in ("<script", "http://", "https://", "src=", "style"))


def test_both_are_open_where_all_else_needs_a_key(start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    url = start(api_key_file=tmp_path / "keys")
    assert call(url, "GET", "/docs").status == 200 and call(url, "GET", "/v1/models").status == 401
    found = document(url)
    locked = {path for path, each in found["paths"].items() if any("security" in one for one in each.values())}
    assert locked == {*BODIES, *OTHERS} - {"/ready", "/health", "/version"}
    assert {*found["components"]["securitySchemes"]} == {"key", "x-api-key"} and "tiny" not in json.dumps(found)


def test_a_wrong_method_and_a_wrong_name_are_told_the_right_one(url: str) -> None:
    answer = call(url, "GET", "/v1/completions")
    assert answer.status == 405 and "use POST" in answer.body and answer.headers["allow"] == "POST"
    assert "did you mean max_tokens?" in post(f"{url}/v1/completions", {"prompt": "x", "max_token": 5}).body
    options = {"stream": True, "stream_options": {"include_usages": True}}
    assert "did you mean include_usage?" in post(f"{url}/v1/completions", {"prompt": "x", **options}).body
