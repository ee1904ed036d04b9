"""Bodies that public clients send to an OpenAI-compatible server, and what becomes of each.

``bodies.json`` has them by client and endpoint, without their ``model``; texts are shortened, and what several share
stands once under ``shared``, which ``"@NAME"`` repeats. `how` says whether the client itself was recorded against a
server of ours or its source was read. A body that the gateway refuses stands with the field that the refusal names.

``python -m tests.support.clients.battery`` writes the tables of docs/openai.md.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("bodies.json")
DOCS = Path(__file__).resolve().parents[3] / "docs" / "openai.md"
PATHS = {
    "chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
}  # fmt: skip
REASONS = {
    "audio": "only text is generated",
    "background": "answers are not stored",
    "conversation": "conversations are not stored",
    "embeddings": "computes no embeddings",
    "functions": "OpenAI's older form",
    "include": "log-probabilities are returned by the other endpoints",
    "input[]": "refers to an item, and none is stored",
    "input[].content[]": "the model reads only text",
    "messages[].content[]": "the model reads only text",
    "previous_response_id": "send the whole conversation",
    "prompt": "prompts are not stored",
    "reasoning": "give reasoning_effort",
    "repeat_penalty": "give repetition_penalty",
    "suffix": "insertion is not supported",
    "text.verbosity": "no levels of verbosity",
    "thinking": "give chat_template_kwargs",
    "tool_choice": "needs tools",
    "tools[]": "function",
    "verbosity": "no levels of verbosity",
    "web_search_options": "does not search the web",
}
"""Fields that are refused, without their indices, and the words of the refusal that say why."""


TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ reasoning_effort }}{{ enable_thinking }}"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
"""A chat template that reads what those of reasoning models read."""


@dataclass(frozen=True)
class Body:
    """One request: ``refused`` is the field that its refusal names, None where it is answered."""

    client: str
    endpoint: str
    body: dict[str, Any]
    refused: str | None

    @property
    def name(self) -> str:
        """The refused field without its indices."""
        return re.sub(r"\[\d+\]", "[]", self.refused or "")


@cache
def clients() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))["clients"]


@cache
def bodies() -> tuple[Body, ...]:
    """All of them, without ``model``."""
    shared = json.loads(FILE.read_text(encoding="utf-8"))["shared"]

    def whole(value: Any) -> Any:
        if isinstance(value, str) and value[:1] == "@" and value[1:] in shared:
            return whole(shared[value[1:]])
        if isinstance(value, dict):
            return {key: whole(entry) for key, entry in value.items()}
        return [whole(entry) for entry in value] if isinstance(value, list) else value

    found = []
    for client, said in clients().items():
        for endpoint in PATHS:
            for entry in said.get(endpoint, ()):
                refused = entry.get("refused")
                found.append(Body(client, endpoint, whole(entry["body"] if refused else entry), refused))
    return tuple(found)


def check_answered(sent: Body, text: str) -> None:
    """The answer to a body, whole or streamed, has what its endpoint's answers have, and it ends."""
    if not sent.body.get("stream"):
        found = json.loads(text)
        assert found["output" if sent.endpoint == "responses" else "choices"] and found["usage"]["total_tokens"] > 0
        return
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert not any(event.get("error") for event in events), text
    if sent.endpoint == "responses":
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        return
    assert text.endswith("data: [DONE]\n\n")
    assert any(choice["finish_reason"] for event in events for choice in event["choices"])
    if (sent.body.get("stream_options") or {}).get("include_usage"):
        assert events[-1]["usage"]["total_tokens"] > 0


def check_refused(sent: Body, status: int, text: str) -> None:
    """The refusal of a body names the field and says why."""
    error, is_embeddings = json.loads(text)["error"], sent.endpoint == "embeddings"
    assert status == (404 if is_embeddings else 400), text
    assert error["param"] == (None if is_embeddings else sent.refused), error
    assert REASONS[sent.name] in error["message"], error


def clients_table() -> str:
    """Clients, their versions, and what becomes of their bodies."""
    rows = ["| client | version | how | bodies | answered | refused |", "|---|---|---|---|---|---|"]
    for client, said in clients().items():
        own = [body for body in bodies() if body.client == client]
        refused = Counter(f"`{body.name}`" for body in own if body.refused)
        named = ", ".join(name if count == 1 else f"{name} {count}×" for name, count in sorted(refused.items()))
        answered = len(own) - sum(refused.values())
        rows.append(f"| {client} | {said['version']} | {said['how']} | {len(own)} | {answered} | {named} |")
    num_refused = sum(body.refused is not None for body in bodies())
    rows.append(f"| all | | | {len(bodies())} | {len(bodies()) - num_refused} | {num_refused} |")
    return "\n".join(rows)


def updated(text: str) -> str:
    """The page with its table between ``<!-- clients -->`` and ``<!-- /clients -->`` as the bodies have it."""
    between = re.compile(r"(?<=<!-- clients -->\n).*(?=\n<!-- /clients -->)", re.DOTALL)
    text, found = between.subn(lambda _: clients_table(), text)
    if found != 1:
        raise ValueError(f"{DOCS} has {found} places for the table; it should have one.")
    return text


if __name__ == "__main__":
    DOCS.write_text(updated(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
