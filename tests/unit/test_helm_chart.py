"""The Helm chart, linted and rendered by Helm itself, against Kubernetes' schemas and what the server really has."""

import json
import math
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from quire_cli.main import app
from quire_engine.slo import parse_classes
from quire_engine.stats import FinishedRequestStats, IterationStats, SchedulerStats
from quire_engine.system.extras import cache_folder
from quire_monitoring.accumulator import Accumulator
from quire_monitoring.definitions import MetricsConfig, series
from support.promql import run_tool
from support.serving import ROOT

helm = pytest.importorskip("helm_python")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = ROOT / "deploy" / "helm" / "quire"
RULES = ROOT / "monitoring" / "prometheus"
KUBERNETES = "1.34"
DEFAULTS: dict[str, Any] = {}
FULL: dict[str, Any] = {
    "replicaCount": 3, "gpus": 2, "runtimeClassName": "nvidia",
    "model": {"claim": "models", "checkpoint": "llama", "name": "chat"},
    "existingSecret": "tokens", "secretHasApiKeys": True, "otlpEndpoint": "http://collector:4317",
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}, "podAnnotations": {"a": "b"},
    "nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "extraEnv": [{"name": "X", "value": "y"}], "imagePullSecrets": [{"name": "registry"}],
    "podLabels": {"team": "chat", "app.kubernetes.io/name": "another"},
    "nameOverride": "llm", "fullnameOverride": "talk",
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca", "readOnly": True}],
    "image": {"digest": f"sha256:{64 * '0'}"}, "modelCache": {"existingClaim": "cache"},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}, "grafanaDashboards": {"enabled": True},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]},
    "ingress": {"enabled": True, "className": "nginx", "annotations": {"a": "b"}, "tls": [{"secretName": "tls"}]},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
        {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway",
         "labelSelector": {"matchLabels": {"team": "chat"}}},
    ],
}  # fmt: skip
HUB: dict[str, Any] = {"model": {"id": "Qwen/Qwen2.5-0.5B", "name": "chat"}, "existingSecret": "tokens"}
SCALED = [{"autoscaling": {kind: {"enabled": True}}} for kind in ("hpa", "keda")]
CASES = [DEFAULTS, FULL, HUB, *SCALED]


def render(values: dict[str, Any], path: Path = CHART) -> dict[str, dict[str, Any]]:
    """Kind → manifest. A test leaves it as it is."""
    return render_once(json.dumps(values), path)


@cache
def render_once(values: str, path: Path) -> dict[str, dict[str, Any]]:
    with helm.Chart.load(str(path)) as chart:
        rendered = chart.render(json.loads(values), name="chat", namespace="llm")
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    found = [document for text in texts for document in yaml.load_all(text, yaml.CSafeLoader) if document]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


@cache
def validate(manifest: str) -> None:
    """Equal manifests of several cases are validated once: the schemas are read each time."""
    kubernetes_validate.validate(json.loads(manifest), KUBERNETES, strict=True)


@pytest.mark.parametrize("values", CASES)
def test_helm_has_nothing_against_it(values: dict[str, Any]) -> None:
    report = helm.lint(str(CHART), values, strict=True, kube_version="v1.34.0")
    assert [one for one in report["messages"] or [] if one["severity"] > 1] == []
    assert not report["errors"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": 2}, "replica"), ({"replicas": 2}, "replicas"),
        ({"gpus": -1}, "gpus"), ({"model": {"checkpoint": "llama"}}, "claim"),
        ({"sharedMemory": "much"}, "sharedMemory"), ({"fullnameOverride": 51 * "x"}, "fullnameOverride"),
        ({"model": {"id": "Qwen"}}, "id"), ({"model": {"id": "a/b", "claim": "models"}}, "claim"),
        ({"model": {"name": "chat"}}, "model"), ({"readinessProbe": {"failureThreshold": 0}}, "failureThreshold"),
        ({"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}, "extraVolumes"), ({"image": {"digest": "x"}}, "digest"),
        ({"httpRoute": {"enabled": True}}, "parentRefs"),
        ({"ingress": {"hosts": [{"host": "x", "paths": [{"path": "x", "pathType": "Prefix"}]}]}}, "path"),
        ({"autoscaling": {"hpa": {"enabled": True}, "keda": {"enabled": True}}}, "autoscaling"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    report = helm.lint(str(CHART), values, strict=True)
    assert named in str(report["errors"]) + str(report["messages"])
    assert report["errors"] or any(one["severity"] == 3 for one in report["messages"])


@pytest.mark.parametrize("values", CASES)
def test_manifests_are_those_that_kubernetes_takes(values: dict[str, Any]) -> None:
    for kind, manifest in render(values).items():
        if kind not in ("HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject"):  # of others' schemas
            validate(json.dumps(manifest))


@pytest.mark.parametrize("values", CASES)
def test_selectors_find_the_pods_and_ports_are_the_servers(values: dict[str, Any]) -> None:
    found = render(values)
    deployment = found["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"].items()
    selectors = [deployment["selector"]["matchLabels"], found["Service"]["spec"]["selector"],
                 found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
                 found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]]  # fmt: skip
    if "PodMonitor" in found:
        selectors.append(found["PodMonitor"]["spec"]["selector"]["matchLabels"])
    assert all(selector and selector.items() <= labels for selector in selectors)
    (container,) = deployment["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {name: option for option in command.params for name in option.opts}
    for argument in container["args"][1:]:
        assert argument.partition("=")[0] in {
            *options,
            *(name for one in options.values() for name in one.secondary_opts),
        }
    for name, option in (("grpc", "--grpc-port"), ("http", "--http-port"), ("metrics", "--metrics-port")):
        assert ports[name] == options[option].default
    for name in ("health", "openai"):
        assert f"--{name}-port={ports[name]}" in container["args"]
    services = {port["name"]: port["port"] for port in found["Service"]["spec"]["ports"]}
    for port in found["Service"]["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"]
    for rule in found["Ingress"]["spec"]["rules"] if "Ingress" in found else ():
        for path in rule["http"]["paths"]:
            assert path["backend"]["service"]["name"] == found["Service"]["metadata"]["name"]
            assert services[path["backend"]["service"]["port"]["name"]] == ports["openai"]
    for rule in found["HTTPRoute"]["spec"]["rules"] if "HTTPRoute" in found else ():
        assert rule["backendRefs"] == [{"name": found["Service"]["metadata"]["name"], "port": ports["openai"]}]
    rules = found["NetworkPolicy"]["spec"]["ingress"]
    # A policy's ports with names are those of the pod.
    assert {port["port"] for rule in rules for port in rule["ports"]} <= ports.keys()
    assert all(rule["from"] for rule in rules)
    if "PodMonitor" in found:
        (endpoint,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in ports


def test_probes_ask_what_tells_the_truth_and_a_stop_waits_for_requests() -> None:
    values = {"drainSeconds": 45, "preStopSeconds": 7, "startupProbe": {"failureThreshold": 20}}
    spec = render(values)["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "health"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 100
    assert container["livenessProbe"]["tcpSocket"] == {"port": "health"}
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert "--drain-timeout=45" in container["args"]
    assert spec["terminationGracePeriodSeconds"] > 45 + 7


def test_an_engine_that_is_started_again_does_not_take_its_pod_out_of_the_services() -> None:
    """Its requests are held; the pod stays for as long as the alert about it waits."""
    (container,) = render(DEFAULTS)["Deployment"]["spec"]["template"]["spec"]["containers"]
    probe = container["readinessProbe"]
    groups = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    (patience,) = (rule["for"] for group in groups for rule in group["rules"] if rule.get("alert") == "QuireEngineDown")
    minutes = int(patience.removesuffix("m"))
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 60 * minutes


def test_a_probe_can_be_another_one() -> None:
    values = {"readinessProbe": {"httpGet": None, "exec": {"command": ["true"]}, "failureThreshold": 2}}
    (container,) = render(values)["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"] == {
        "exec": {"command": ["true"]}, "failureThreshold": 2, "periodSeconds": 5, "timeoutSeconds": 3,
    }  # fmt: skip


def test_gpus_replicas_and_secrets_are_where_they_belong() -> None:
    found = render(FULL)
    deployment, pod = found["Deployment"]["spec"], found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (deployment["replicas"], container["resources"]["limits"]["nvidia.com/gpu"]) == (3, 2)
    assert (pod["runtimeClassName"], container["resources"]["limits"]["memory"]) == ("nvidia", "16Gi")
    assert {"--model=/models/llama", "--name=chat", "--api-key-file=/etc/quire/api-keys"} <= set(container["args"])
    mounts, volumes = ({one["name"] for one in part} for part in (container["volumeMounts"], pod["volumes"]))
    assert mounts == volumes == {"tmp", "shm", "cache", "models", "keys", "ca"}
    assert "nvidia.com/gpu" not in str(render(DEFAULTS))
    assert "replicas" not in render(SCALED[0])["Deployment"]["spec"]


def test_names_and_labels_are_those_that_were_asked_for() -> None:
    found = render(FULL)
    assert {one["metadata"]["name"] for one in found.values()} == {"talk", "talk-dashboards"}
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert (labels["team"], labels["app.kubernetes.io/name"]) == ("chat", "llm"), "a selector's label is not replaced"
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"quire@sha256:{64 * '0'}"
    own, given = found["Deployment"]["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert own["labelSelector"]["matchLabels"].items() <= labels.items()
    assert given["labelSelector"] == {"matchLabels": {"team": "chat"}}


def test_a_cluster_that_chooses_the_ids_is_left_to_choose_them() -> None:
    values = {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
              "securityContext": {"readOnlyRootFilesystem": False}}  # fmt: skip
    manifest = render(values)["Deployment"]
    validate(json.dumps(manifest))
    pod = manifest["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": False, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def test_a_model_of_the_hub_is_downloaded_before_the_server_starts(capsys: Any, monkeypatch: Any) -> None:
    pod = render({**HUB, "gpus": 1})["Deployment"]["spec"]["template"]["spec"]
    (download,), (server,) = pod["initContainers"], pod["containers"]
    assert {"--model=Qwen/Qwen2.5-0.5B", "--name=chat"} <= set(server["args"])
    assert "nvidia.com/gpu" not in download["resources"]["limits"]
    for key in ("image", "securityContext"):
        assert download[key] == server[key]
    cache = {"name": "cache", "mountPath": "/cache"}
    assert cache in download["volumeMounts"]
    assert cache in server["volumeMounts"]
    folder = {"name": "XDG_CACHE_HOME", "value": "/cache"}
    assert folder in download["env"]
    assert folder in server["env"]
    assert "HF_TOKEN" in str(download["env"])
    assert "HF_TOKEN" not in str(server["env"])
    python, option, code, *arguments = download["command"]
    assert (python, option) == ("python3", "-c")
    monkeypatch.setattr("quire_engine.config.hub.fetch_checkpoint", lambda name: f"folder of {name}")
    monkeypatch.setattr("sys.argv", [option, *arguments])
    exec(code, {})
    assert capsys.readouterr().out == "folder of Qwen/Qwen2.5-0.5B\n"
    # Both find the Hub's cache in that folder, and the server its packed weights.
    done = subprocess.run(
        [sys.executable, "-c", "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"],
        env={"PATH": "", **{one["name"]: one["value"] for one in server["env"] if "value" in one}},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout == "/cache/huggingface/hub\n"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder("weights") == Path("/cache/quire/weights")
    mounts = {mount["name"] for mount in download["volumeMounts"]}
    assert mounts <= {volume["name"] for volume in pod["volumes"]}
    assert "initContainers" not in render(DEFAULTS)["Deployment"]["spec"]["template"]["spec"]


def test_a_cache_without_a_claim_ends_with_its_pod() -> None:
    def cache(values: dict[str, Any]) -> Any:
        volumes = render(values)["Deployment"]["spec"]["template"]["spec"]["volumes"]
        return next(volume for volume in volumes if volume["name"] == "cache")

    assert cache(DEFAULTS) == {"name": "cache", "emptyDir": {}}
    assert cache(FULL) == {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}


def test_rules_and_dashboards_are_those_of_the_repository() -> None:
    found = render(FULL)
    files = [yaml.safe_load((RULES / name).read_text()) for name in ("alerts.yml", "recording_rules.yml")]
    assert found["PrometheusRule"]["spec"]["groups"] == [group for file in files for group in file["groups"]]
    dashboards = {path.name: path.read_text() for path in (ROOT / "monitoring" / "grafana" / "dashboards").iterdir()}
    assert {name: json.loads(text) for name, text in found["ConfigMap"]["data"].items()} == {
        name: json.loads(text) for name, text in dashboards.items()
    }
    assert found["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    for kind in ("PodMonitor", "PrometheusRule"):
        assert found[kind]["metadata"]["labels"]["release"] == "prometheus"


def test_a_packaged_chart_holds_what_the_folder_links_to(tmp_path: Path) -> None:
    assert render(FULL, Path(helm.package(str(CHART), destination=str(tmp_path)))) == render(FULL)


def test_a_way_in_without_keys_says_so() -> None:
    def notes(values: dict[str, Any]) -> str:
        with helm.Chart.load(str(CHART)) as chart:
            return str(chart.render(values, name="chat", namespace="llm")["quire/templates/NOTES.txt"])

    assert "without a key" in notes({"ingress": {"enabled": True}})
    assert "without a key" in notes({"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}})
    assert "without a key" not in notes(FULL) + notes(DEFAULTS)


def test_both_scalers_go_by_the_queue_and_by_the_burn() -> None:
    hpa, keda = (render(values) for values in SCALED)
    metrics = [one["pods"]["metric"]["name"] for one in hpa["HorizontalPodAutoscaler"]["spec"]["metrics"]]
    assert metrics == ["quire_requests_waiting", "quire_slo_burn"]
    assert metrics == [rule["name"]["as"] for rule in adapter_rules()], "the adapter's rules are in the docs"
    assert len(keda["ScaledObject"]["spec"]["triggers"]) == len(metrics)


def adapter_rules() -> list[dict[str, Any]]:
    """Those of Prometheus' adapter, in the docs."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (block,) = re.findall(r"^```yaml\n(rules:\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found: list[dict[str, Any]] = yaml.safe_load(block)["rules"]
    return found


def promtool_test(
    folder: Path, series: dict[str, str], expected: dict[str, list[tuple[str, float]]],
    *, interval: str = "15s", eval_time: str = "10m",
) -> None:  # fmt: skip
    """Series with a value per interval, and what expressions give after some time, with the chart's rules."""
    (folder / "rules.yml").write_text(
        json.dumps(render({"prometheusRule": {"enabled": True}})["PrometheusRule"]["spec"])
    )
    content = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": interval,
        "tests": [{
            "interval": interval,
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {"expr": expression, "eval_time": eval_time,
                 "exp_samples": [{"labels": labels, "value": value} for labels, value in samples]}
                for expression, samples in expected.items()
            ],
        }],
    }  # fmt: skip
    (folder / "test.yml").write_text(json.dumps(content))  # JSON is YAML
    assert "SUCCESS" in run_tool("promtool", "test", "rules", "test.yml", cwd=folder)


def target_labels(monitor: dict[str, Any], pod: str, address: str) -> str:
    """Of what Prometheus scrapes by a PodMonitor, as its operator configures it."""
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    metadata = monitor["metadata"]
    labels = {"job": f"{metadata.get('namespace', 'llm')}/{metadata['name']}", "instance": address, "namespace": "llm",
              "pod": pod, "container": "quire", "endpoint": endpoint["port"]}  # fmt: skip
    for rule in endpoint.get("relabelings", ()):
        labels[rule["targetLabel"]] = rule["replacement"]
    return ", ".join(f'{name}="{value}"' for name, value in labels.items())


FIRING = 'count by (alertname, pod) (ALERTS{alertstate="firing", alertname!="QuireWatchdog"})'


@pytest.mark.parametrize(
    ("up", "fires"), [("1x60", []), ("1x10 0x50", ["QuireServerDown"])], ids=["all is well", "one is down"]
)
def test_alerts_know_the_pods_of_the_chart_by_their_real_labels(tmp_path: Path, up: str, fires: list[str]) -> None:
    monitor = render({"podMonitor": {"enabled": True}})["PodMonitor"]
    engine = 'model="m", version="1", engine="0"'
    well, other = (target_labels(monitor, f"chat-quire-{pod}", f"10.0.0.{pod}:8002") for pod in (1, 2))
    series = {
        f"up{{{well}}}": "1x60", f"quire_engine_up{{{engine}, {well}}}": "1x60", f"up{{{other}}}": up,
        f"quire_engine_up{{{engine}, {other}}}": "1x60" if up == "1x60" else "1x10 stale",
    }  # fmt: skip
    expected = [(f'{{alertname="{name}", pod="chat-quire-2"}}', 1.0) for name in fires]
    promtool_test(tmp_path, series, {FIRING: expected})


def test_a_cluster_pages_for_want_of_any_server_and_not_while_a_pod_loads(tmp_path: Path) -> None:
    monitor = render({"podMonitor": {"enabled": True}})["PodMonitor"]
    loading = target_labels(monitor, "chat-quire-2", "10.0.0.2:8002")
    assert 'job="llm/chat-quire"' in loading, "the operator's own name of the job"
    well = target_labels(monitor, "chat-quire-1", "10.0.0.1:8002")
    up = f'quire_engine_up{{model="m", version="1", engine="0", {well}}}'
    series = {f"up{{{loading}}}": "0x60"}
    promtool_test(tmp_path, {**series, f"up{{{well}}}": "1x60", up: "1x60"}, {FIRING: []})
    absent = {FIRING: [('{alertname="QuireServerAbsent"}', 1.0)]}
    promtool_test(tmp_path, series, absent)
    promtool_test(tmp_path, {}, absent)


def test_the_burn_that_scales_is_by_the_objective_of_each_class_and_nothing_while_idle(tmp_path: Path) -> None:
    """Of 100 requests 5 miss: half of what the class `lax` may, five times what `strict` may."""
    scaler = render(SCALED[1])["ScaledObject"]
    (_, trigger) = (one["metadata"]["query"] for one in scaler["spec"]["triggers"])
    of_adapter = adapter_rules()[1]["metricsQuery"]

    def adapters(pods: str) -> str:
        query = of_adapter.replace("<<.LabelMatchers>>", f'namespace="llm",pod=~"{pods}"')
        return str(query.replace("<<.GroupBy>>", "pod").replace("<<.Series>>", "quire_slo_requests_total"))

    series: dict[str, str] = {}
    for pod, engines, classes in (
        ("lax", 1, ["lax"]),
        ("both", 2, ["lax", "strict"]),
        ("idle", 1, ["lax"]),
        ("bare", 1, []),
    ):
        for engine in range(engines):
            labels = f'namespace="llm", pod="chat-quire-{pod}", model="m", version="1", engine="{engine}"'
            series[f"quire_engine_up{{{labels}}}"] = "1x60"
            for slo in classes:
                series[f'quire_slo_objective_ratio{{{labels}, slo="{slo}"}}'] = f"{0.9 if slo == 'lax' else 0.99}x60"
                for verdict, number in (("good", 95), ("miss", 5)):
                    name = f'quire_slo_requests_total{{{labels}, slo="{slo}", verdict="{verdict}"}}'
                    series[name] = "7x60" if pod == "idle" else f"0+{number}x60"
    idle = {name: values for name, values in series.items() if 'pod="chat-quire-idle"' in name or "bare" in name}

    def rounded(query: str) -> str:
        return f"round({query}, 0.001)"

    promtool_test(tmp_path, series, {
        rounded(adapters("chat-quire-.*")): [
            (f'{{pod="chat-quire-{pod}"}}', burn)
            for pod, burn in (("lax", 0.5), ("both", 5.0), ("idle", 0.0), ("bare", 0.0))
        ],
        rounded(trigger): [("{}", 5.0 * 4)],
    })  # fmt: skip
    promtool_test(tmp_path, idle, {
        rounded(adapters("chat-quire-idle")): [('{pod="chat-quire-idle"}', 0.0)], rounded(trigger): [("{}", 0.0)],
    })  # fmt: skip
    promtool_test(tmp_path, {}, {rounded(trigger): [("{}", 0.0)]})


# -- a step to three times what can be served --------------------------------------------------------------------------

CALM, END = 900, 1080
"""Seconds: five requests a second, then thirty."""
SLOTS, LENGTH = 200, 20.0
"""Requests that run at once, and for how long: ten a second can be served."""
TTFT = 0.5
"""The target. A request that need not wait has its first token in a fifth of it."""


@dataclass
class Seen:
    """Second by second, what is exported of the overload, by the real exporter on a clock of ours."""

    judges_live: bool
    goodput: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    counted: dict[str, list[float]] = field(default_factory=lambda: {"good": [], "miss": []})

    def __post_init__(self) -> None:
        now = 0.0
        slo_classes = parse_classes({"default": {"ttft_ms": 1000 * TTFT}})
        accumulator = Accumulator(MetricsConfig(slo_classes=slo_classes), clock=lambda: now)
        reader = accumulator.reader()
        arrivals = [second + place / rate for second in range(END)
                    for rate in [5 if second < CALM else 30] for place in range(rate)]  # fmt: skip
        starts: list[float] = []
        for number, arrival in enumerate(arrivals):
            starts.append(max(arrival, starts[number - SLOTS] + LENGTH if number >= SLOTS else 0.0))
        num_waiting = 0
        happens: dict[int, list[tuple[str, bool]]] = defaultdict(list)
        for arrival, start in zip(arrivals, starts, strict=True):
            is_late = start + TTFT / 5 > arrival + TTFT
            for what, at in (
                ("comes", arrival),
                ("starts", start),
                ("is due", arrival + TTFT),
                ("ends", start + LENGTH),
            ):
                happens[math.ceil(at)].append((what, is_late))
        for second in range(1, END + 1):
            now, iteration = float(second), IterationStats()
            for what, is_late in happens[second]:
                num_waiting += (what == "comes") - (what == "starts")
                if what == "is due" and is_late and self.judges_live:
                    iteration.misses.append(("default", "ttft", ""))
                if what == "ends":
                    verdict, cause = ("miss", "ttft") if is_late else ("good", "none")
                    iteration.finished_requests.append(
                        FinishedRequestStats("length", slo_verdict=verdict, slo_cause=cause,
                                             missed_live=is_late and self.judges_live)
                    )  # fmt: skip
            accumulator.record(SchedulerStats(num_waiting=num_waiting), iteration)
            gauges, (counters, _) = accumulator.gauges(True, []), reader.take()
            self.goodput.append(gauges[series("quire_goodput_ratio", slo="default", window="1m")])
            self.waiting.append(sum(gauges[one] for one in gauges if one[0] == "quire_requests_waiting"))
            for verdict, cause in (("good", "none"), ("miss", "ttft")):
                name = series("quire_slo_requests_total", slo="default", verdict=verdict, cause=cause)
                counted = self.counted[verdict]
                counted.append(counters[name] + (counted[-1] if counted else 0.0))

    def burn(self, second: int, window: int) -> float:
        """Of an objective of 0.99."""
        good, miss = (counts[second] - counts[max(second - window, 0)] for counts in self.counted.values())
        return 100 * miss / (good + miss) if good + miss else 0.0

    def first(self, says_so: Callable[[int], bool]) -> int:
        """Seconds from the step to the first second at whose end something says so."""
        return next(second for second in range(CALM, END) if says_so(second)) + 1 - CALM

    def series(self) -> dict[str, str]:
        """For promtool, with a value for each five seconds."""
        labels = 'namespace="llm", pod="chat-quire-1", model="m", version="1", engine="0"'
        found = {f'quire_slo_requests_total{{{labels}, slo="default", verdict="{verdict}"}}': counts
                 for verdict, counts in self.counted.items()}  # fmt: skip
        found[f'quire_requests_waiting{{{labels}, reason="queue"}}'] = self.waiting
        found[f'quire_slo_objective_ratio{{{labels}, slo="default"}}'] = [0.99] * END
        found[f"quire_engine_up{{{labels}}}"] = [1.0] * END
        return {name: " ".join(f"{value:g}" for value in values[4::5]) for name, values in found.items()}


def test_a_step_to_three_times_saturation_is_said_at_the_first_misses_and_not_when_requests_end(tmp_path: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["autoscaling"]
    before, after = Seen(judges_live=False), Seen(judges_live=True)
    misses = after.first(lambda second: after.counted["miss"][second] > 0)
    firsts = {
        "goodput_ratio 1m below its objective": lambda seen: lambda second: seen.goodput[second] < 0.99,
        "KEDA's query of the burn scales": lambda seen: lambda second: seen.burn(second, 300) > values["burnRate"],
        "the burn of 5 min is above 14.4": lambda seen: lambda second: seen.burn(second, 300) > 14.4,
        "QuireSLOBurnFast fires": lambda seen: (
            lambda second: min(seen.burn(second, 300), seen.burn(second, 3600)) > 14.4
        ),
        "KEDA's query of the queue scales": lambda seen: (
            lambda second: seen.waiting[second] > values["waitingPerReplica"]
        ),
    }
    found = {what: (before.first(says_so(before)), after.first(says_so(after))) for what, says_so in firsts.items()}
    print(f"seconds after the step; the first miss is in second {misses}")
    for what, (then, now) in found.items():
        print(f"{what:40} judged at the end {then:4}, by the clock {now:4}")
    assert found["goodput_ratio 1m below its objective"][1] <= misses + 1
    *burns, queue = found.values()
    assert all(now <= then - 15 for then, now in burns)
    assert queue[0] == queue[1]

    (_, trigger) = (one["metadata"]["query"] for one in render(SCALED[1])["ScaledObject"]["spec"]["triggers"])
    for what, expression, labels in (
        ("KEDA's query of the burn scales", f"({trigger}) > bool {values['burnRate']}", "{}"),
        ("QuireSLOBurnFast fires", 'count(ALERTS{alertname="QuireSLOBurnFast"}) or vector(0)', "{}"),
    ):
        at = 5 * ((CALM + found[what][1]) // 5 + 2)  # once it has been scraped
        for seen, is_said in ((before, 0.0), (after, 1.0)):
            promtool_test(tmp_path, seen.series(), {expression: [(labels, is_said)]}, interval="5s", eval_time=f"{at}s")


def test_the_image_has_what_the_chart_starts() -> None:
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    (container,) = render(DEFAULTS)["Deployment"]["spec"]["template"]["spec"]["containers"]
    (command,) = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    assert json.loads(command) == [*container["command"], *container["args"]][: len(json.loads(command))]
    (environment,) = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    of_image = dict(one.split("=") for one in environment.split())
    of_chart = {one["name"]: one["value"] for one in container["env"]}
    assert of_chart == of_image
    assert set(of_image.values()) <= {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "USER 1000:1000" in text
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version, "the image's tag"
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert render(DEFAULTS)["Deployment"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 1000
    assert values["image"]["repository"] == "quire"
