"""What the deployment examples start and open: command lines of `kvforge serve`, ports, services, network policies."""

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvforge.cli import make_parser
from kvforge.commands.serve_doors import Doors, choose_doors
from kvforge.gateway.http.auth import ENVIRONMENT

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "deployment"
OTHERS = {"ray": 6379}
"""Ports of programs beside `kvforge serve`; they have no keys."""


@dataclass(frozen=True)
class Started:
    """One `kvforge serve` of an example: its options, the ports that are declared beside it, and for a pod its labels.
    `published` are the ports that a Service gives to clients, `policies` the rules of network policies for it."""

    args: argparse.Namespace
    has_key: bool
    declared: frozenset[int]
    labels: dict[str, str] = field(default_factory=dict)
    published: frozenset[int] = frozenset()
    policies: tuple[dict[str, Any], ...] = ()

    @property
    def doors(self) -> Doors:
        return choose_doors(self.args, self.has_key)

    @property
    def open_ports(self) -> dict[int, str]:
        """What other machines reach, and the name of its door."""
        doors = self.doors
        return {doors.ports[name]: name for name, address in doors.addresses.items() if not address.is_loopback}


def parse_serve(words: list[str]) -> argparse.Namespace:
    return make_parser().parse_args(["serve", *words])


def started(name: str, text: str) -> list[Started]:
    """All that an example of this file name starts."""
    if name == "Dockerfile":
        return [_image(text)]
    if name.endswith(".service"):
        return [_unit(text)]
    return list(_pods([document for document in yaml.safe_load_all(text) if document is not None]))


def problems(name: str, text: str) -> list[str]:
    """What of an example is open that should not be."""
    return [problem for one in started(name, text) for problem in _problems(one)]


def _problems(one: Started) -> Iterator[str]:
    for door in one.doors.open_without_key:
        yield f"{door} generates for other machines without a key"
    programs = one.declared & set(OTHERS.values())
    if one.declared - programs != one.open_ports.keys():
        yield f"ports {sorted(one.declared)} are declared, {sorted(one.open_ports)} are open"
    for port in one.published:
        if one.open_ports.get(port) != "openai":
            yield f"port {port} is published, which needs no key"
    if not one.labels:
        return
    if not one.policies:
        yield "no network policy says who reaches the pod"
    for rule in (rule for policy in one.policies for rule in policy.get("ingress", ())):
        sources = rule.get("from") or [{}]
        own = all("namespaceSelector" not in source and source.get("podSelector") for source in sources)
        named = all(
            source.get("namespaceSelector", source.get("podSelector", {})).get("matchLabels") for source in sources
        )
        opened = {port["port"] for port in rule.get("ports", [])}
        if not opened and not own:
            yield "a network policy opens all ports to other pods"
        if opened & OTHERS.keys() and not own:
            yield "a network policy opens a program without keys to other pods"
        if opened - {"openai"} and not (own or named):
            yield f"a network policy opens {', '.join(sorted(opened))} to the whole cluster"


def _image(text: str) -> Started:
    entry, command = (
        json.loads(re.findall(rf"^{word} (\[.*\])$", text, re.MULTILINE)[0]) for word in ("ENTRYPOINT", "CMD")
    )
    assert entry == ["kvforge", "serve"]
    args = parse_serve(command)
    exposed = re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE)[0].split()
    return Started(args, args.api_key_file is not None, frozenset(map(int, exposed)))


def _unit(text: str) -> Started:
    program, command, *words = shlex.split(re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)[0])
    assert program.endswith("/kvforge") and command == "serve"
    args = parse_serve(words)
    one = Started(args, args.api_key_file is not None, frozenset())
    return Started(args, one.has_key, frozenset(one.open_ports))  # a unit declares none


def pod_templates(documents: list[dict[str, Any]]) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Labels and specification of the pods that documents make; KServe puts the labels on by itself."""
    for document in documents:
        spec = document.get("spec", {})
        if "template" in spec:
            yield spec["template"]["metadata"]["labels"], spec["template"]["spec"]
        elif document["kind"] == "ServingRuntime":
            yield {}, spec


def _pods(documents: list[dict[str, Any]]) -> Iterator[Started]:
    for labels, pod in pod_templates(documents):
        for container in pod["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            names = {variable["name"] for variable in container.get("env", [])}
            for words in _serve_lines(container):
                args = parse_serve(words)
                yield Started(
                    args,
                    args.api_key_file is not None or ENVIRONMENT in names,
                    frozenset(ports.values()),
                    labels,
                    frozenset(ports[port["targetPort"]] for port in _published(documents)),
                    tuple(_policies(documents, labels)),
                )


def _serve_lines(container: dict[str, Any]) -> list[list[str]]:
    """The words after `kvforge serve`: the image's entry point without a command, else in lines of a shell."""
    if "command" not in container:
        return [container["args"]]
    lines = [line for line in container["args"][-1].splitlines() if "kvforge serve" in line]
    return [shlex.split(line.partition("kvforge serve")[2]) for line in lines]


def _published(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        port for document in documents if document["kind"] == "Service" for port in document["spec"].get("ports", [])
    ]


def _policies(documents: list[dict[str, Any]], labels: dict[str, str]) -> list[dict[str, Any]]:
    specs = [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]
    return [
        spec for spec in specs
        if spec["podSelector"].get("matchLabels", {}).items() <= labels.items() and "Ingress" in spec["policyTypes"]
    ]  # fmt: skip
