"""The Helm chart, rendered by Helm's own library and held against the schemas of Kubernetes.

The kinds of other projects (ServiceMonitor, ScaledObject, ...) are read by models that are made
from their definitions. What is not installed is skipped, and the reason names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from typing import Any

import pytest
import yaml

from server.config import parse_settings
from server.options import OPTIONS
from tests.deploy.promql import DEPLOY

CHART = DEPLOY / "helm" / "paceline"
KUBERNETES = "1.31"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "keys": {"apiKeys": {"keys": ["team-a:secret-1", "secret-2"]}, "replicas": 3},
    "everything": {
        "model": {"path": "qwen.gguf", "servedName": "qwen", "size": "40Gi"},
        "apiKeys": {"existingSecret": "keys-of-ours"},
        "metrics": {
            "open": False,
            "serviceMonitor": {"enabled": True, "labels": {"release": "monitoring"}},
            "prometheusRule": {"enabled": True},
            "dashboards": {"enabled": True},
        },
        "settings": {
            "max_running": 128,
            "max_body_bytes": 10000000,
            "kv_memory": "8GiB",
            "prefix_caching": True,
            "cors_origin": ["https://a.example", "https://b.example"],
        },
        "autoscaling": {"kind": "hpa"},
        "threads": 4,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "runtimeClassName": "nvidia",
        "networkPolicy": {"from": [{"podSelector": {"matchLabels": {"role": "gateway"}}}]},
        "drainSeconds": 120,
    },
    "keda": {"autoscaling": {"kind": "keda", "maxReplicas": 8}},
}
# kind: where its model is, in a package made from the definitions of its project
MODELS = {
    "ServiceMonitor": "cloudcoil.models.prometheus_operator.v1",
    "PrometheusRule": "cloudcoil.models.prometheus_operator.v1",
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
}

needs_helm = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None, reason="helm-python-sdk is not installed"
)
variants = pytest.mark.parametrize("variant", VARIANTS)
Object = dict[str, Any]


def render(values: dict[str, Any]) -> list[Object]:
    import helm_python

    with helm_python.Chart.load(str(CHART)) as chart:
        rendered = chart.render(values, name="demo", namespace="prod")
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def only(objects: list[Object], kind: str) -> Object:
    (found,) = [one for one in objects if one["kind"] == kind]
    return found


def container(objects: list[Object]) -> Object:
    (found,) = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def environment(objects: list[Object]) -> dict[str, str]:
    entries = container(objects)["env"]
    found = {entry["name"]: entry["value"] for entry in entries}
    assert len(found) == len(entries), "a variable is set twice"
    return found


@needs_helm
def test_helm_finds_nothing_to_complain_about() -> None:
    import helm_python

    found = helm_python.lint(str(CHART))
    assert found["errors"] == []
    assert [m for m in found["messages"] if "icon is recommended" not in m["error"]] == []


@needs_helm
@variants
def test_every_object_is_valid_for_kubernetes(variant: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    core = [one for one in render(VARIANTS[variant]) if one["kind"] not in MODELS]
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= {
        one["kind"] for one in core
    }
    for one in core:
        assert kubernetes_validate.validate(one, KUBERNETES, strict=True) == KUBERNETES


@needs_helm
@pytest.mark.parametrize(
    ("variant", "kind"),
    [("everything", "ServiceMonitor"), ("everything", "PrometheusRule"), ("keda", "ScaledObject")],
)
def test_objects_of_other_projects_are_valid(variant: str, kind: str) -> None:
    pytest.importorskip("cloudcoil")
    try:
        module = importlib.import_module(MODELS[kind])
    except ModuleNotFoundError:
        pytest.skip(f"{MODELS[kind]} is not installed")
    one = only(render(VARIANTS[variant]), kind)
    read = getattr(module, kind).model_validate(one)
    kept = read.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert _missing(one, kept) == [], "the model does not know these fields"


def _missing(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Paths that we wrote and that were not kept."""
    if isinstance(ours, dict):
        if not isinstance(theirs, dict):
            return [where]
        return [
            path
            for key, value in ours.items()
            for path in (
                _missing(value, theirs[key], f"{where}.{key}")
                if key in theirs
                else [f"{where}.{key}"]
            )
        ]
    if isinstance(ours, list):
        pairs = zip(ours, theirs, strict=True)
        return [path for one, other in pairs for path in _missing(one, other, where + "[]")]
    return []


@needs_helm
@variants
def test_variables_are_settings_of_the_server(variant: str) -> None:
    variables = environment(render(VARIANTS[variant]))
    # The file is in the pod.
    variables.pop("PACELINE_API_KEY_FILE", None)
    settings = parse_settings([], variables)
    assert settings.server.host == "0.0.0.0"
    assert settings.server.port == 8000
    if variant == "everything":
        assert settings.limits.max_running == 128
        assert settings.server.max_body_bytes == 10_000_000
        assert settings.server.cors_origins == ("https://a.example", "https://b.example")
        assert settings.engine.model == "/models/qwen.gguf"
        assert not settings.server.open_metrics


def test_the_chart_knows_every_setting_of_the_server_and_no_other() -> None:
    """A slip in `settings` is found by Helm, not by a pod that ends again and again."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    taken = schema["properties"]["settings"]["propertyNames"]["enum"]
    set_by_the_chart = {"host", "port", "model", "served_model_name", "threads", "open_metrics"}
    set_by_the_chart |= {"drain_seconds", "stall_seconds", "api_key", "api_key_file"}
    assert taken == sorted(OPTIONS.keys() - set_by_the_chart)


@needs_helm
@variants
def test_pod_outlives_its_drain(variant: str) -> None:
    """B127: the grace period covers the wait, the drain and the closing."""
    objects = render(VARIANTS[variant])
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    drain = float(environment(objects)["PACELINE_DRAIN_SECONDS"])
    command, seconds = container(objects)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= float(seconds) + drain + 5


@needs_helm
@variants
def test_probes_ask_what_they_mean(variant: str) -> None:
    """B134: alive while it loads, ready only when it can serve."""
    found = container(render(VARIANTS[variant]))
    paths = {name: found[name]["httpGet"]["path"] for name in found if name.endswith("Probe")}
    assert paths == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    assert found["ports"][0]["containerPort"] == 8000


@needs_helm
@variants
def test_pod_has_no_rights_that_it_does_not_need(variant: str) -> None:
    objects = render(VARIANTS[variant])
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    context = container(objects)["securityContext"]
    assert context["readOnlyRootFilesystem"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"]["drop"] == ["ALL"]
    mounts = {mount["mountPath"]: mount for mount in container(objects)["volumeMounts"]}
    assert all(mount.get("readOnly") for path, mount in mounts.items() if path != "/tmp")
    assert {mount["name"] for mount in mounts.values()} == {one["name"] for one in pod["volumes"]}


@needs_helm
def test_autoscaler_and_not_the_chart_decides_the_replicas() -> None:
    assert only(render({}), "Deployment")["spec"]["replicas"] == 1
    for variant, kind in (("everything", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        objects = render(VARIANTS[variant])
        assert "replicas" not in only(objects, "Deployment")["spec"]
        name = only(objects, kind)["spec"]["scaleTargetRef"]["name"]
        assert name == only(objects, "Deployment")["metadata"]["name"]


@needs_helm
def test_network_policy_lets_in_requests_and_metrics_and_nothing_out() -> None:
    policy = only(render({}), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    (rule,) = policy["ingress"]
    assert rule["from"][0] == {"podSelector": {}}
    assert len(rule["from"]) == 2


@needs_helm
def test_new_keys_make_new_pods_and_are_no_variable() -> None:
    one, other = (render({"apiKeys": {"keys": keys}}) for keys in (["a-key"], ["b-key"]))
    annotations = [
        only(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]
        for objects in (one, other)
    ]
    assert annotations[0] != annotations[1]
    assert "a-key" not in str(only(one, "Deployment"))
    assert only(one, "Secret")["stringData"] == {"keys": "a-key"}


@needs_helm
@pytest.mark.parametrize(
    "values",
    [
        {"settings": {"max_num_seqs": 64}},
        {"replica": 2},
        {"autoscaling": {"kind": "vertical"}},
        {"settings": {"port": 80}},
        {"apiKeys": {"keys": ["with space"]}},
        {"apiKeys": {"keys": ["#a-remark"]}},
        {"drainSeconds": -1},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError):
        render(values)


@needs_helm
def test_rules_and_dashboards_arrive_unchanged() -> None:
    objects = render(VARIANTS["everything"])
    rules = yaml.safe_load((DEPLOY / "prometheus/paceline.rules.yaml").read_text(encoding="utf-8"))
    assert only(objects, "PrometheusRule")["spec"] == rules
    data = only(objects, "ConfigMap")["data"]
    for path in (DEPLOY / "grafana/dashboards").glob("*.json"):
        assert data[path.name].strip() == path.read_text(encoding="utf-8").strip()
