"""The pods of the examples under the restricted Pod Security Standard, rule by rule, and what stands beside them."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvforge.serving.server.ports import PORTS
from tests.support.deployment_examples import EXAMPLES, pod_templates

FORBIDDEN = {
    "windowsOptions": "HostProcess", "hostNetwork": "Host Namespaces", "hostPID": "Host Namespaces",
    "hostIPC": "Host Namespaces", "privileged": "Privileged Containers", "hostPath": "HostPath Volumes",
    "hostPort": "Host Ports", "host": "Host Probes / Lifecycle Hooks", "appArmorProfile": "AppArmor",
    "seLinuxOptions": "SELinux", "procMount": "/proc Mount Type", "sysctls": "Sysctls",
}  # fmt: skip
"""Fields that none of the examples needs, by the rule that allows few of their values or none."""
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
PODS = ["kubernetes.yaml", "kubernetes-vllm.yaml", "kserve.yaml"]


def documents(name: str) -> dict[str, Any]:
    return {found["kind"]: found for found in yaml.safe_load_all((EXAMPLES / name).read_text())}


def pod_of(name: str) -> dict[str, Any]:
    ((_, pod),) = pod_templates(list(documents(name).values()))
    return pod


def fields(value: Any) -> Iterator[str]:
    for key, below in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield str(key)
        yield from fields(below)


def broken_rules(pod: dict[str, Any]) -> set[str]:
    broken = {FORBIDDEN[field] for field in fields(pod) if field in FORBIDDEN}
    if any(not {*volume} - {"name"} <= VOLUMES for volume in pod["volumes"]):
        broken.add("Volume Types")
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        own = container.get("securityContext", {})
        context = pod.get("securityContext", {}) | own
        rules = {
            "Privilege Escalation": own.get("allowPrivilegeEscalation") is False,
            "Running as Non-root": context.get("runAsNonRoot") is True,
            "Running as Non-root user": context.get("runAsUser") != 0,
            "Seccomp": context.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "Capabilities": own.get("capabilities") == {"drop": ["ALL"]},
        }
        broken |= {rule for rule, holds in rules.items() if not holds}
    return broken


@pytest.mark.parametrize("name", PODS)
def test_pods_keep_the_restricted_standard(name: str) -> None:
    assert broken_rules(pod_of(name)) == set()


@pytest.mark.parametrize(
    ("rule", "place", "value"),
    [
        ("Volume Types", "volumes", [{"name": "x", "nfs": {}}]),
        ("Running as Non-root user", "securityContext", {"runAsNonRoot": True, "runAsUser": 0}),
        ("Running as Non-root", "securityContext", {}),
        ("Seccomp", "securityContext", {"seccompProfile": {"type": "Unconfined"}}),
        ("Capabilities", "containers", [{"securityContext": {"capabilities": {"drop": ["ALL"], "add": ["KILL"]}}}]),
        ("Privilege Escalation", "containers", [{}]),
        ("Host Ports", "containers", [{"ports": [{"hostPort": 80}]}]),
    ],
)
def test_a_broken_rule_is_found(rule: str, place: str, value: Any) -> None:
    assert rule in broken_rules(pod_of("kubernetes.yaml") | {place: value})


def test_what_stands_beside_the_pods_names_them() -> None:
    deployment, pod = documents("kubernetes.yaml")["Deployment"]["metadata"], pod_of("kubernetes.yaml")
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] and not pod["automountServiceAccountToken"]
    for name, kind in (("kubernetes-hpa.yaml", "HorizontalPodAutoscaler"), ("kubernetes-keda.yaml", "ScaledObject")):
        assert documents(name)[kind]["spec"]["scaleTargetRef"]["name"] == deployment["name"]
    monitor = documents("kubernetes-monitoring.yaml")["PodMonitor"]["spec"]
    assert monitor["podMetricsEndpoints"][0]["port"] in ports
    gateway = documents("kubernetes-gateway.yaml")
    pool = gateway["InferencePool"]["spec"]
    assert monitor["selector"]["matchLabels"] == pool["selector"]["matchLabels"] == deployment["labels"]
    assert pool["targetPorts"] == [{"number": PORTS["openai"]}]
    picker = yaml.safe_load(gateway["ConfigMap"]["data"]["config.yaml"])
    assert picker["plugins"][0]["parameters"] == {"port": PORTS["metrics"]}
    used = {one["pluginRef"] for one in picker["schedulingProfiles"][0]["plugins"]}
    assert used <= {one["type"] for one in picker["plugins"]}
