"""The Grafana dashboard and the alert rules ask for metrics that the server gives, by labels that these have."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvforge.serving.client import StreamingClient
from kvforge.serving.health.probe import read_metrics
from kvforge.serving.server.launcher import TritonServer
from kvforge.serving.stub.metric_tables import HISTOGRAMS
from tests.support.serving.server import ask, wait_until

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "deployment"
OF_PROMETHEUS = {"instance", "job"}
"""Labels that are put on when a server is scraped."""
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?(?!\w*\s*\()")
MATCHER = re.compile(r"(\w+)\s*(=~|!~|!=|=)\s*\"([^\"]*)\"")
Series = list[tuple[str, dict[str, str]]]


def expressions() -> dict[str, str]:
    """Every query by where it stands."""
    dashboard = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    assert len(found) == sum(len(panel["targets"]) for panel in dashboard["panels"])
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    return found | {rule["alert"]: rule["expr"] for rule in rules} | scaling()


def scaling() -> dict[str, str]:
    """What replicas are added and chosen by."""
    hpa, keda, *_, picker = (
        document
        for name in ("hpa", "keda", "gateway")
        for document in yaml.safe_load_all((FOLDER / f"kubernetes-{name}.yaml").read_text())
    )
    specs = re.findall(r"(\w+Spec): (\S+)", picker["data"]["config.yaml"])
    assert len(specs) == 3
    return {
        "HPA": hpa["spec"]["metrics"][0]["pods"]["metric"]["name"],
        "KEDA": keda["spec"]["triggers"][0]["metadata"]["query"],
        **{name: re.sub(r"=(\w+)", r'="\1"', spec) for name, spec in specs},
    }


def problems(expression: str, series: Series) -> Iterator[str]:
    """What a query names that no series has."""
    names = []
    text = re.sub(r"\[[^\]]*\]", " ", expression)
    for match in SELECTOR.finditer(GROUPING.sub(" ", text)):
        name, matchers = match[1], MATCHER.findall(match[2] or "")
        names.append(name)
        fitting = [labels for other, labels in series if other == name]
        if not fitting:
            yield f"there is no {name}"
        for label, sign, value in matchers:
            if label in OF_PROMETHEUS:
                continue
            values = value.split("|") if sign == "=~" else [value]
            for wanted in values:
                if not any(labels.get(label) == wanted for labels in fitting):
                    yield f'{name} has no {label}="{wanted}"'
    if not names:
        yield "it names no metric"
    for group in GROUPING.findall(text):
        for label in re.findall(r"\w+", group):
            if label not in OF_PROMETHEUS and not any(label in labels for name, labels in series if name in names):
                yield f"no metric of it has the label {label}"


@pytest.fixture(scope="module")
def series(server: TritonServer) -> Series:
    """What a server that has answered gives."""
    with StreamingClient(server.grpc_url) as client:
        list(client.generate("tensorrt_llm", ask("tensorrt_llm", [5, 6, 7], 4)))
    counts = {f"{family}_count" for family, _ in HISTOGRAMS.values()}
    wait_until(
        lambda: counts <= {name.partition("{")[0] for name in read_metrics(server.metrics_url)}, "all histograms"
    )
    samples = (re.fullmatch(r"([\w:]+)(?:\{(.*)\})?", name) for name in read_metrics(server.metrics_url))
    return [(match[1], dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))) for match in samples if match]


@pytest.mark.parametrize("place", expressions())
def test_queries_name_what_there_is(series: Series, place: str) -> None:
    assert list(problems(expressions()[place], series)) == []


def test_a_wrong_query_is_found(series: Series) -> None:
    for wrong, says in {
        "sum(rate(kvforge_tokens_total[5m]))": "there is no kvforge_tokens_total",
        'kvforge_requests_total{outcome=~"failed|gone", instance="x"} > 0': 'has no outcome="gone"',
        "sum by (instance, colour) (kvforge_open_requests)": "has the label colour",
        "vector(1)": "it names no metric",
    }.items():
        assert any(says in problem for problem in problems(wrong, series)), wrong


def test_panels_have_places_and_alerts_say_what_to_do() -> None:
    dashboard = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    for rule in yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
