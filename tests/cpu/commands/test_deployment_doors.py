"""No deployment example, and no command of the documents, opens a door to other machines without a key."""

import re
import shlex
from pathlib import Path

import pytest

from tests.support.deployment_examples import EXAMPLES, problems, started

DOCS = EXAMPLES.parent
BESIDE = {f"kubernetes-{name}.yaml" for name in ("gateway", "hpa", "keda", "monitoring")}
NAMES = sorted(
    {path.name for path in EXAMPLES.iterdir()} - BESIDE - {"alerts.yaml", "compose.yaml", "grafana.json", "nginx.conf"}
)
COMMAND = re.compile(r"(?:kvforge serve|kvforge-serve|kvforge\.gateway)\b((?:\\\n|[^`\n]|\n(?=\s+[-/]))*)")
EVERYWHERE = re.compile(r"address[= ](?:0\.0\.0\.0|::)")


def text_of(name: str) -> str:
    return (EXAMPLES / name).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_examples_open_nothing_without_a_key(name: str) -> None:
    assert started(name, text_of(name)) and problems(name, text_of(name)) == []


@pytest.mark.parametrize("name", ["Dockerfile", "kserve.yaml", "kubernetes.yaml", "kubernetes-vllm.yaml"])
def test_what_is_for_clients_is_the_api_behind_a_key(name: str) -> None:
    for one in started(name, text_of(name)):
        assert one.has_key and set(one.open_ports.values()) == {"metrics", "health", "openai"}


@pytest.mark.parametrize(
    ("name", "old", "new", "found"),
    [
        ("Dockerfile", '"--api-key-file", "/keys", ', "", "openai generates for other machines without a key"),
        ("Dockerfile", '"--metrics-address"', '"--http-address"', "http generates"),
        ("Dockerfile", "EXPOSE 8002", "EXPOSE 8000 8002", "are declared"),
        ("kvforge.service", "--drain-timeout 30", "--address 0.0.0.0", "http generates"),
        ("kubernetes.yaml", "- --api-key-file=/etc/kvforge/api-keys", "- --no-page", "grpc generates"),
        ("kubernetes.yaml", "- --metrics-address=0.0.0.0", "- --grpc-address=0.0.0.0", "grpc generates"),
        ("kubernetes.yaml", "- --metrics-address=0.0.0.0", "- --no-page", "are declared"),
        ("kubernetes.yaml", "targetPort: openai", "targetPort: metrics", "port 8002 is published"),
        ("kubernetes.yaml", "kind: NetworkPolicy", "kind: Policy", "no network policy"),
        ("kubernetes.yaml", "      ports:\n        - {port: metrics}", "", "opens all ports"),
        ("kubernetes.yaml", "- {port: openai}", "- {port: metrics}", "opens metrics to the whole cluster"),
        ("kubernetes-vllm.yaml", " --api-key-file=/etc/kvforge/api-keys", "", "openai generates"),
        ("kubernetes-vllm.yaml", "- {port: openai}", "- {port: ray}", "opens a program without keys"),
        ("kubernetes-vllm.yaml", "targetPort: openai", "targetPort: ray", "port 6379 is published"),
    ],
)
def test_an_open_door_is_found(name: str, old: str, new: str, found: str) -> None:
    assert old in text_of(name)
    assert any(found in problem for problem in problems(name, text_of(name).replace(old, new)))


def commands() -> list[tuple[Path, str]]:
    """Every command of the documents that serves, with its options."""
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
    return [(page, options) for page in pages for options in COMMAND.findall(page.read_text())]


def test_commands_of_the_documents_that_listen_everywhere_have_a_key() -> None:
    everywhere = [(page, options) for page, options in commands() if EVERYWHERE.search(options)]
    assert len(everywhere) >= 2
    for page, options in everywhere:
        assert "--api-key-file" in options, f"{page.name}: {shlex.join(options.split())}"


def test_published_ports_of_the_documents_are_the_apis() -> None:
    text = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    published = re.findall(r"docker run[^`]*? -p (\S+)", text)
    assert published and set(published) == {"8080:8080"}
