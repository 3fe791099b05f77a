# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/: the dashboard asks for metrics that exist, the image has all it
needs, flags are known.
"""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from configured import serve_parser
from conftest import ROOT
from vllm.v1.metrics import loggers
from vllm.v1.spec_decode import metrics as spec_decode

from vllm_ppd.heads.hub import hub_name
from vllm_ppd.vllm_plugins.engine.metrics import COUNTERS, INFO

DEPLOY = ROOT / "deploy"


def test_dashboard_and_alerts_name_metrics_that_exist() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    queries = "\n".join(
        target["expr"] for panel in panels for target in panel.get("targets", [])
    )
    # Prometheus names counters ..._total
    ours = set(re.findall(r"ppd:(\w+)_total\b", queries))
    counters = {name.partition("/")[0] for name in COUNTERS}
    assert ours == counters
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    alerts = "\n".join(rule["expr"] for rule in group["rules"])
    assert set(re.findall(r"ppd:(\w+?)(?:_total)?\b", alerts)) <= counters
    queries += alerts
    assert set(re.findall(r"\bppd_\w+", queries)) == {INFO}
    source = inspect.getsource(loggers) + inspect.getsource(spec_decode)
    known = set(re.findall(r"\"(vllm:\w+)\"", source))
    for name in set(re.findall(r"vllm:\w+", queries)):
        assert re.sub("_(total|bucket)$", "", name) in known, name


def test_image_is_sound() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists() and "next" in linter.parts:
        pytest.skip("the next vLLM's environment has no linter")
    run = subprocess.run(
        [linter, DEPLOY / "Dockerfile"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_image_has_what_the_package_is_built_of() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    copied: set[str] = set()
    for names in re.findall(r"^COPY (.*) \S+$", image, re.MULTILINE):
        copied |= set(names.split())
    built = (ROOT / "pyproject.toml").read_text()
    folders = re.findall(r"^\"vllm_ppd\.\w+\" = \"(\w+)\"$", built, re.MULTILINE)
    assert copied == {*folders, "pyproject.toml", "README.md", "LICENSE"}
    version = re.search(r"^ARG VLLM=v(\S+)$", image, re.MULTILINE)
    assert version is not None
    assert f'VLLM = "{version[1]}"' in (ROOT / ".ci" / "install.py").read_text()


def test_deployment_serves_as_vllm_is_served() -> None:
    parts: dict[str, Any] = {
        part["kind"]: part
        for part in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    }
    pod = parts["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    args = serve_parser().parse_args(container["args"][1:])
    assert hub_name(args.spec_model) is not None
    # A rolling update would start a pod that waits for a volume and a GPU which the old
    # one holds.
    assert parts["Deployment"]["spec"]["strategy"]["type"] == "Recreate"
    user = pod["spec"]["securityContext"]["runAsUser"]
    assert f"\nUSER {user}\n" in (DEPLOY / "Dockerfile").read_text()
    (port,) = container["ports"]
    assert port["containerPort"] == args.port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {
            "path": "/health",
            "port": port["name"],
        }
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    labels = pod["metadata"]["labels"]
    assert parts["Service"]["spec"]["selector"] == labels
    assert parts["Deployment"]["spec"]["selector"]["matchLabels"] == labels
