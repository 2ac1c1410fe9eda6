"""Kubernetes, Helm, compose, the image and systemd: each is taken by its own tool, and all say the same."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from orchestrator.config import KVRegConfig
from tests.deploy.sources import DEPLOY, RULES

pytestmark = pytest.mark.observability

helm = pytest.importorskip("helm_python", reason="pip install kvreg[deploy]")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kvreg[deploy]")

CHART = DEPLOY / "helm" / "kvreg"
KUBERNETES = "1.32"
OPERATOR_KINDS = {"PodMonitor", "PrometheusRule"}
"""Custom resources; their schemas are the Prometheus operator's, which no tool here has."""

Resources = dict[str, dict[str, Any]]


def tool(name: str) -> str:
    """A program, on the path or beside this Python."""
    found = shutil.which(name) or shutil.which(name, path=Path(sys.executable).parent)
    if found is None and name == "kubectl":
        pytest.skip("kubectl is not installed, and Debian's is too old to read components")
    assert found, f"{name} is missing: pip install kvreg[deploy], or apt-get install systemd"
    return found


def kustomized(folder: str) -> Resources:
    """The resources of a kustomization, by kind."""
    command = [tool("kubectl"), "kustomize", str(DEPLOY / "kubernetes" / folder)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {resource["kind"]: resource for resource in yaml.safe_load_all(text)}


def rendered(chart: Path = CHART, **values: Any) -> Resources:
    """The resources of a chart, by kind."""
    with helm.Chart.load(str(chart)) as loaded:
        texts = loaded.render(values, name="demo", namespace="ml")
    resources = [resource for name, text in texts.items() if name.endswith(".yaml") for resource in yaml.safe_load_all(text) if resource]
    return {resource["kind"]: resource for resource in resources}


def validate(resources: Resources) -> None:
    """Every resource of Kubernetes' own against its schema, unknown fields refused."""
    for kind, resource in resources.items():
        if kind not in OPERATOR_KINDS:
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)


@pytest.mark.kubectl
def test_kustomize_gives_any_deployment_the_ledger_and_its_exporter() -> None:
    """My Deployment, labelled kvreg=required, gets the directory, the variable, the sidecar, and keeps what it had."""
    resources = kustomized("example")
    validate(resources)
    mine = yaml.safe_load((DEPLOY / "kubernetes" / "example" / "vllm.yaml").read_text())["spec"]["template"]["spec"]["containers"][0]
    pod = resources["Deployment"]["spec"]["template"]
    engine, exporter = pod["spec"]["containers"]
    assert pod["metadata"]["labels"] == {"app": "vllm", "kvreg": "required"}
    assert {key: engine[key] for key in mine} == mine
    assert {"name": "KVREG_LEDGER_DIR", "value": engine["volumeMounts"][0]["mountPath"]} in engine["env"]
    assert f"--collector.textfile.directory={exporter['volumeMounts'][0]['mountPath']}" in exporter["args"]
    assert engine["volumeMounts"][0]["mountPath"] == exporter["volumeMounts"][0]["mountPath"]
    assert {port["name"] for container in (engine, exporter) for port in container["ports"]} == {
        endpoint["port"] for endpoint in resources["PodMonitor"]["spec"]["podMetricsEndpoints"]
    }


@pytest.mark.kubectl
def test_a_deployment_without_the_label_is_left_alone(tmp_path: Path) -> None:
    """Deployments that do not run kvreg get no sidecar."""
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    mine = tmp_path / "kubernetes" / "example" / "vllm.yaml"
    mine.write_text(mine.read_text().replace("    kvreg: required\n", ""))
    command = [tool("kubectl"), "kustomize", str(mine.parent)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    [deployment] = [resource for resource in yaml.safe_load_all(text) if resource["kind"] == "Deployment"]
    assert len(deployment["spec"]["template"]["spec"]["containers"]) == 1


def test_the_chart_has_no_complaint() -> None:
    """helm lint finds nothing but the missing icon, with an engine and without."""
    for values in ({}, {"vllm": {"enabled": True}}):
        found = helm.lint(str(CHART), values, strict=True)
        assert found["errors"] == []
        assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


@pytest.mark.kubectl
def test_the_chart_and_kustomize_give_the_same() -> None:
    """Alerts, scraping, dashboard and sidecar do not depend on how they are installed."""
    chart, base, example = rendered(vllm={"enabled": True}), kustomized("base"), kustomized("example")
    validate(chart)
    assert chart["PrometheusRule"]["spec"] == base["PrometheusRule"]["spec"]
    assert chart["PrometheusRule"]["spec"]["groups"][0]["rules"] == RULES
    assert chart["PodMonitor"]["spec"] == base["PodMonitor"]["spec"]
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "kvreg.json").read_text())
    assert json.loads(chart["ConfigMap"]["data"]["kvreg.json"]) == json.loads(base["ConfigMap"]["data"]["kvreg.json"]) == dashboard
    assert chart["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == base["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"]
    [by_chart, by_kustomize] = [resources["Deployment"]["spec"]["template"]["spec"] for resources in (chart, example)]
    assert by_chart["containers"][1] == by_kustomize["containers"][1]
    assert by_chart["volumes"] == by_kustomize["volumes"]
    assert by_chart["containers"][0]["env"] == by_kustomize["containers"][0]["env"]


def test_the_chart_links_to_published_runbooks() -> None:
    """With runbookUrl set, every alert links there."""
    rules = rendered(runbookUrl="https://runbooks.example/kvreg")["PrometheusRule"]["spec"]["groups"][0]["rules"]
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules if "alert" in rule}
    assert links == {alert: f"https://runbooks.example/kvreg/{alert}.md" for alert in links}


def test_each_part_of_the_chart_can_be_left_out() -> None:
    """Nothing is installed that I turned off."""
    off = {"enabled": False}
    assert rendered(podMonitor=off, prometheusRule=off, dashboard=off) == {}


@pytest.mark.parametrize(
    "values", [{"runbookUrl": "https://runbooks.example/"}, {"ledger": {"port": "9101"}}, {"podmonitor": {"enabled": False}}]
)
def test_the_chart_refuses_values_it_does_not_know(values: dict[str, Any]) -> None:
    """A value that is misspelled or of the wrong type is refused, not ignored."""
    with helm.Chart.load(str(CHART)) as chart, pytest.raises(helm.HelmError):
        chart.validate_schema(values)


def test_another_chart_can_take_the_sidecar(tmp_path: Path) -> None:
    """A chart with this one as a dependency gives its own Deployment the sidecar, as the notes say."""
    parent = tmp_path / "parent"
    (parent / "templates").mkdir(parents=True)
    shutil.copytree(CHART, parent / "charts" / "kvreg")
    (parent / "Chart.yaml").write_text("apiVersion: v2\nname: parent\nversion: 1.0.0\n")
    notes = (CHART / "templates" / "NOTES.txt").read_text().replace('{{ "{{-" }}', "{{-").replace('{{ "{{" }}', "{{")
    containers = notes[notes.index("      containers:") : notes.index("and the pod template")]
    head = "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: mine\nspec:\n  template:\n    spec:\n"
    (parent / "templates" / "mine.yaml").write_text(head + containers)
    pod = rendered(parent)["Deployment"]["spec"]["template"]["spec"]
    sidecar = rendered(vllm={"enabled": True})["Deployment"]["spec"]["template"]["spec"]
    assert pod["containers"][1] == sidecar["containers"][1]
    assert pod["volumes"] == sidecar["volumes"]
    assert pod["containers"][0]["volumeMounts"] == sidecar["containers"][0]["volumeMounts"]
    assert pod["containers"][0]["env"] == sidecar["containers"][0]["env"]


def test_compose_takes_the_stack_and_its_services_are_those_the_configurations_name() -> None:
    """docker compose accepts the file, every mounted file exists, and the servers find each other by their names."""
    command = [tool("docker-compose"), "--file", str(DEPLOY / "compose" / "compose.yaml"), "config", "--format", "json"]
    services = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            assert volume["type"] == "volume" or Path(volume["source"]).exists()
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    targets = [target for job in prometheus["scrape_configs"] for static in job["static_configs"] for target in static["targets"]]
    targets += [
        target
        for alerting in prometheus["alerting"]["alertmanagers"]
        for static in alerting["static_configs"]
        for target in static["targets"]
    ]
    alertmanager = yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yml").read_text())
    targets += [hook["url"].split("/")[2] for receiver in alertmanager["receivers"] for hook in receiver["webhook_configs"]]
    sources = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    targets += [source["url"].split("/")[2] for source in sources]
    assert {target.partition(":")[0] for target in targets} == {"node-exporter", "vllm", "alertmanager", "receiver", "prometheus"}
    assert {target.partition(":")[0] for target in targets} <= set(services)


def test_the_image_has_no_complaint() -> None:
    """hadolint finds nothing in the Dockerfile."""
    ran = subprocess.run([tool("hadolint"), str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """systemd-analyze verifies both units; the engine's program is where you installed it, so it is replaced."""
    for unit in (DEPLOY / "systemd").glob("*.service"):
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/vllm/bin/vllm", "/bin/true"))
    units = sorted(str(unit) for unit in tmp_path.iterdir())
    ran = subprocess.run([tool("systemd-analyze"), "verify", *units], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.kubectl
def test_engines_are_started_the_same_way_everywhere() -> None:
    """Kustomize, Helm and compose name the connector as it is called, and settings that exist."""
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]["vllm"]["command"]
    by_kustomize = kustomized("example")["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
    by_chart = rendered(vllm={"enabled": True})["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
    for arguments in (compose, by_kustomize, by_chart):
        [transfer] = [json.loads(argument.partition("=")[2]) for argument in arguments if argument.startswith("--kv-transfer-config=")]
        assert (transfer["kv_connector"], transfer["kv_connector_module_path"]) == ("KVRegConnector", "orchestrator.connector")
        KVRegConfig.parse(transfer["kv_connector_extra_config"])


def test_the_stand_in_for_a_pager_prints_what_it_is_told() -> None:
    """`docker compose logs receiver` shows each notification: where to, whether it fires, and the summary."""
    program = [sys.executable, str(DEPLOY / "compose" / "receiver.py"), "0"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout
        try:
            port = int(receiver.stdout.readline().rpartition(" ")[2])
            told = {
                "status": "firing",
                "alerts": [{"annotations": {"summary": "8 workers refused"}}, {"annotations": {"summary": "and more"}}],
            }
            urlopen(f"http://127.0.0.1:{port}/page", json.dumps(told).encode(), timeout=10).close()
            assert receiver.stdout.readline() == "page: firing: 8 workers refused; and more\n"
        finally:
            receiver.kill()
