"""The deployment examples against the command line they start: options, ports, probes, timeouts. Whom they let in is
checked in test_deployment_doors.py."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = None  # type: ignore[assignment]

from kvforge.cli import make_parser
from kvforge.serving.server.ports import PORTS
from tests.support.deployment_examples import EXAMPLES, parse_serve, started

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())}


@pytest.fixture(scope="module")
def pod(manifests: dict[str, Any]) -> dict[str, Any]:
    return manifests["Deployment"]["spec"]["template"]


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["spec"]["containers"]
    return found


def test_the_pod_starts_the_server_with_options_it_has(container: dict[str, Any]) -> None:
    args = parse_serve(container["args"])
    assert args.openai and args.no_restart
    declared = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert declared.items() <= PORTS.items()


def test_probes_ask_the_health_port(container: dict[str, Any]) -> None:
    paths = {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/live"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "health"}


def test_a_pod_gets_longer_to_end_than_it_drains(container: dict[str, Any], pod: dict[str, Any]) -> None:
    (sleep, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    drain = parse_serve(container["args"]).drain_timeout
    assert pod["spec"]["terminationGracePeriodSeconds"] >= float(seconds) + drain + 10


def test_volumes_exist_and_shared_memory_is_memory(container: dict[str, Any], pod: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts["/tmp"]["emptyDir"] is not None  # run directories; the root file system is read-only
    args = parse_serve(container["args"])
    assert str(args.engine) in mounts
    assert str(args.api_key_file.parent) in mounts
    assert mounts[str(args.api_key_file.parent)]["secret"]["items"][0]["path"] == args.api_key_file.name


def test_the_service_finds_the_pods_and_their_ports(manifests: dict[str, Any], pod: dict[str, Any]) -> None:
    labels = pod["metadata"]["labels"]
    service = manifests["Service"]["spec"]
    assert manifests["Deployment"]["spec"]["replicas"] > 1
    assert manifests["Deployment"]["spec"]["selector"]["matchLabels"] == service["selector"] == labels
    assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    declared = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["ports"]}.items() <= declared.items()
    assert int(pod["metadata"]["annotations"]["prometheus.io/port"]) == declared["metrics"]


def test_the_image_starts_the_server_and_asks_after_its_health() -> None:
    text = (EXAMPLES / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE_IMAGE=[a-z]+:[\d.]+-", text, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE_IMAGE}"}
    (image,) = started("Dockerfile", text)
    assert f"127.0.0.1:{image.args.health_port}/ready" in text


@pytest.mark.skipif(tomllib is None, reason="tomllib comes with Python 3.11")
def test_the_image_installs_the_serve_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["serve"]
    installed = re.findall(r'"([a-z]\S*[<>]\S*)"', (EXAMPLES / "Dockerfile").read_text())
    assert sorted(installed) == sorted(name.partition(";")[0] for name in extra)


@pytest.mark.skipif(tomllib is None, reason="tomllib comes with Python 3.11")
def test_the_image_is_built_from_all_that_the_wheel_has() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert kept == {*wheel["packages"], *wheel["force-include"], "pyproject.toml", "README.md", "LICENSE"}


def test_compose_starts_the_image_with_what_it_needs() -> None:
    service = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]["kvforge"]
    (image,) = started("Dockerfile", (EXAMPLES / "Dockerfile").read_text())
    assert service["volumes"] == [f".{path}:{path}:ro" for path in (image.args.engine, image.args.api_key_file)]
    assert service["ports"] == ["127.0.0.1:8080:8080"] and (EXAMPLES / service["build"]["context"]).samefile(ROOT)
    assert ":exec," in service["tmpfs"][0]  # the run directory holds programs
    assert int(service["stop_grace_period"][:-1]) >= image.args.drain_timeout + 10


def test_the_unit_starts_the_server_and_waits_for_its_drain() -> None:
    text = (EXAMPLES / "kvforge.service").read_text()
    program, *words = shlex.split(re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)[0])
    assert program.endswith("/kvforge") and words[0] == "serve"
    assert (
        float(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0]) >= parse_serve(words[1:]).drain_timeout + 10
    )
    assert "KillMode=mixed" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze, of Debian's systemd")
def test_systemd_knows_the_units_settings_and_finds_it_hardened(tmp_path: Path) -> None:
    unit = tmp_path / "kvforge.service"
    unit.write_text((EXAMPLES / unit.name).read_text().replace("/opt/kvforge/.venv/bin/kvforge", "/bin/true"))
    for check in (["verify"], ["security", "--offline=true", "--threshold=25"]):  # tenths of the exposure level
        result = subprocess.run(["systemd-analyze", *check, str(unit)], capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")


def test_the_pods_of_several_machines_serve_with_options_there_are() -> None:
    """And what the comments build the engine with is taken by the build."""
    text = (EXAMPLES / "kubernetes-vllm.yaml").read_text()
    documents = list(yaml.safe_load_all(text))
    stateful, headless, clients, _ = documents
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    (line,) = [line for line in container["args"][0].splitlines() if "kvforge serve" in line]
    args = parse_serve(shlex.split(line)[3:])
    assert args.openai
    declared = {port["name"]: port["containerPort"] for port in container["ports"] if port["name"] != "ray"}
    assert declared.items() <= PORTS.items()
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(args.engine), str(args.api_key_file.parent), "/dev/shm"} <= mounts
    assert stateful["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= args.drain_timeout + 10

    options = re.findall(r"^#\s+(--tensor.*)$", text, re.MULTILINE)[0]
    build = make_parser().parse_args(["build", "CHECKPOINT", "-o", "ENGINE", "--target", "vllm", *shlex.split(options)])
    ranks = build.tensor_parallel_size * build.pipeline_parallel_size
    assert ranks == stateful["spec"]["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"]
    assert json.loads(build.engine_args) == {"distributed_executor_backend": "ray"}

    address = f"{stateful['metadata']['name']}-0.{headless['metadata']['name']}:6379"
    assert container["args"][0].count(address) == 1 and {"name": "RAY_ADDRESS", "value": address} in container["env"]
    assert stateful["spec"]["serviceName"] == headless["metadata"]["name"] and headless["spec"]["clusterIP"] == "None"
    ports = {port["containerPort"] for port in container["ports"]}
    assert {port["port"] for port in clients["spec"]["ports"]} <= ports
