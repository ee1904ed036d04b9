"""The pods of the examples under the restricted Pod Security Standard, rule by rule, and what stands beside them."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvforge.serving.server.ports import PORTS
from tests.support.deployment_examples import EXAMPLES, pod_templates

FORBIDDEN = {
    "HostProcess": "windowsOptions", "Host Namespaces": "hostNetwork hostPID hostIPC", "SELinux": "seLinuxOptions",
    "Privileged Containers": "privileged", "Host Ports": "hostPort", "Host Probes / Lifecycle Hooks": "host",
    "AppArmor": "appArmorProfile", "/proc Mount Type": "procMount", "Sysctls": "sysctls",
}  # fmt: skip
"""Fields without which a rule holds; the standard allows some of their values."""
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def documents(name: str) -> dict[str, Any]:
    return {found["kind"]: found for found in yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text())}


def pod_of(name: str) -> dict[str, Any]:
    ((_, pod),) = pod_templates(list(documents(name).values()))
    return pod


def fields(value: Any) -> Iterator[str]:
    for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from fields(below)
    yield from value if isinstance(value, dict) else ()


def broken_rules(pod: dict[str, Any]) -> set[str]:
    found = [(rule, {*names.split()}.isdisjoint(fields(pod))) for rule, names in FORBIDDEN.items()]
    found.append(("Volume Types", all({*volume} - {"name"} <= VOLUMES for volume in pod["volumes"])))
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        own = container.get("securityContext", {})
        context = pod.get("securityContext", {}) | own
        found += [
            ("Privilege Escalation", own.get("allowPrivilegeEscalation") is False),
            ("Running as Non-root", context.get("runAsNonRoot") is True),
            ("Running as Non-root user", context.get("runAsUser") != 0),
            ("Seccomp", context.get("seccompProfile") == {"type": "RuntimeDefault"}),
            ("Capabilities", own.get("capabilities") == {"drop": ["ALL"]}),
        ]
    return {rule for rule, holds in found if not holds}


@pytest.mark.parametrize("name", ["kubernetes", "kubernetes-vllm", "kserve"])
def test_pods_keep_the_restricted_standard(name: str) -> None:
    assert broken_rules(pod_of(name)) == set()


def test_a_broken_rule_is_found() -> None:
    root = {"securityContext": {"runAsUser": 0}, "containers": [{}], "volumes": [{"name": "x", "hostPath": {}}]}
    rules = "Volume Types, Privilege Escalation, Running as Non-root, Running as Non-root user, Seccomp, Capabilities"
    assert broken_rules(root) == set(rules.split(", "))
    for rule, names in FORBIDDEN.items():
        assert all(broken_rules(pod_of("kubernetes") | {"x": [{name: 1}]}) == {rule} for name in names.split())


def test_what_stands_beside_the_pods_names_them() -> None:
    labels, (container,) = (
        documents("kubernetes")["Deployment"]["metadata"]["labels"],
        pod_of("kubernetes")["containers"],
    )
    for name, kind in (("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        assert documents(f"kubernetes-{name}")[kind]["spec"]["scaleTargetRef"]["name"] == labels["app"]
    monitor, gateway = documents("kubernetes-monitoring")["PodMonitor"]["spec"], documents("kubernetes-gateway")
    assert monitor["podMetricsEndpoints"][0]["port"] in [port["name"] for port in container["ports"]]
    pool, picker = gateway["InferencePool"]["spec"], yaml.safe_load(gateway["ConfigMap"]["data"]["config.yaml"])
    assert monitor["selector"]["matchLabels"] == pool["selector"]["matchLabels"] == labels
    assert pool["targetPorts"] == [{"number": PORTS["openai"]}]
    assert picker["plugins"][0]["parameters"] == {"port": PORTS["metrics"]}
