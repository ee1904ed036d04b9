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
    return {found["kind"]: found for found in yaml.safe_load_all((EXAMPLES / name).read_text())}


def pod_of(name: str) -> dict[str, Any]:
    ((_, pod),) = pod_templates(list(documents(name).values()))
    return pod


def fields(value: Any) -> Iterator[str]:
    for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from fields(below)
    yield from value if isinstance(value, dict) else ()


def broken_rules(pod: dict[str, Any]) -> set[str]:
    there = set(fields(pod))
    rules = {rule: there.isdisjoint(names.split()) for rule, names in FORBIDDEN.items()}
    rules["Volume Types"] = all({*volume} - {"name"} <= VOLUMES for volume in pod["volumes"])
    broken = {rule for rule, holds in rules.items() if not holds}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        own = container.get("securityContext", {})
        context = pod.get("securityContext", {}) | own
        rules = {
            "Privilege Escalation": own.get("allowPrivilegeEscalation") is False,
            "Running as Non-root": context.get("runAsNonRoot") is True,
            "Running as Non-root user": context.get("runAsUser") != 0,
            "Seccomp": context.get("seccompProfile") == {"type": "RuntimeDefault"},
            "Capabilities": own.get("capabilities") == {"drop": ["ALL"]},
        }
        broken |= {rule for rule, holds in rules.items() if not holds}
    return broken


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-vllm.yaml", "kserve.yaml"])
def test_pods_keep_the_restricted_standard(name: str) -> None:
    assert broken_rules(pod_of(name)) == set()


def test_a_broken_rule_is_found() -> None:
    root = {"securityContext": {"runAsUser": 0}, "containers": [{}], "volumes": [{"name": "x", "hostPath": {}}]}
    rules = "Volume Types, Privilege Escalation, Running as Non-root, Running as Non-root user, Seccomp, Capabilities"
    assert broken_rules(root) == set(rules.split(", "))
    for rule, names in FORBIDDEN.items():
        for name in names.split():
            assert broken_rules(pod_of("kubernetes.yaml") | {"x": [{name: True}]}) == {rule}


def test_what_stands_beside_the_pods_names_them() -> None:
    deployment, pod = documents("kubernetes.yaml")["Deployment"]["metadata"], pod_of("kubernetes.yaml")
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    for name, kind in (("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        target = documents(f"kubernetes-{name}.yaml")[kind]["spec"]["scaleTargetRef"]
        assert target["name"] == deployment["name"]
    monitor = documents("kubernetes-monitoring.yaml")["PodMonitor"]["spec"]
    assert monitor["podMetricsEndpoints"][0]["port"] in [port["name"] for port in pod["containers"][0]["ports"]]
    gateway = documents("kubernetes-gateway.yaml")
    pool, picker = gateway["InferencePool"]["spec"], yaml.safe_load(gateway["ConfigMap"]["data"]["config.yaml"])
    assert monitor["selector"]["matchLabels"] == pool["selector"]["matchLabels"] == deployment["labels"]
    assert pool["targetPorts"] == [{"number": PORTS["openai"]}]
    assert picker["plugins"][0]["parameters"] == {"port": PORTS["metrics"]}
