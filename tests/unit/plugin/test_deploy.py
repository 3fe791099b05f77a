# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/: the dashboard asks for metrics that exist, the image has all it
needs, flags are known.
"""

import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics import loggers
from vllm.v1.spec_decode import metrics as spec_decode

from vllm_ppd.heads.hub import hub_name
from vllm_ppd.vllm_plugins import register
from vllm_ppd.vllm_plugins.engine.metrics import COUNTERS

DEPLOY = ROOT / "deploy"
# Of vLLM's series, and of ours
LABELS = {
    "model_name",
    "engine",
    "position",
    "le",
    "reason",
}


def test_dashboard_shows_metrics_that_exist() -> None:
    panels = [
        panel
        for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]
        if panel["type"] != "row"
    ]
    asked = "\n".join(target["expr"] for panel in panels for target in panel["targets"])
    ours = set(re.findall(r"ppd:(\w+)_total\b", asked))
    assert ours == {name.partition("/")[0] for name in COUNTERS}, (
        "a counter of ours that is not shown, or one that is not there"
    )
    assert asked.count("ppd:") == len(re.findall(r"ppd:\w+_total\b", asked)), (
        "Prometheus names counters ..._total"
    )
    known = set(
        re.findall(
            r"\"(vllm:\w+)\"",
            inspect.getsource(loggers) + inspect.getsource(spec_decode),
        )
    )
    for name in set(re.findall(r"vllm:\w+", asked)):
        assert re.sub("_(total|bucket)$", "", name) in known, name
    for expression in asked.splitlines():
        assert expression.count("(") == expression.count(")") and expression.count(
            "{"
        ) == expression.count("}")
        for labels in re.findall(r"(?:by|ignoring) \((\w+)\)", expression):
            assert labels in LABELS, expression
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))


def test_image_is_sound() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists() and "next" in linter.parts:
        pytest.skip("the next vLLM's environment has no linter")
    run = subprocess.run(
        [linter, DEPLOY / "Dockerfile"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_image_has_what_the_package_is_built_of() -> None:
    copied = {
        word
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for word in line.split()[1:-1]
    }
    built = (ROOT / "pyproject.toml").read_text()
    folders = re.findall(r"^\"vllm_ppd\.\w+\" = \"(\w+)\"$", built, re.MULTILINE)
    assert set(folders) | {"pyproject.toml", "README.md", "LICENSE"} == copied
    version = re.search(
        r"^ARG VLLM=v(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE
    )
    assert (
        version is not None
        and f'VLLM = "{version[1]}"' in (ROOT / ".ci" / "install.py").read_text()
    )


def test_deployment_serves_as_vllm_is_served() -> None:
    places = ("launchers", "common")  # of vLLM 0.32, and of 0.33
    (place,) = [p for p in places if find_spec(f"vllm.entrypoints.{p}.cli_args")]
    cli_args = import_module(f"vllm.entrypoints.{place}.cli_args")
    register()
    parts: dict[str, Any] = {
        part["kind"]: part
        for part in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    }
    pod = parts["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(container["args"][1:])
    assert hub_name(args.spec_model) is not None
    assert pod["spec"]["restartPolicy"] == "Always"
    # A rolling update would start a pod that waits for a volume and a GPU which the old
    # one holds.
    assert parts["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert parts["Deployment"]["spec"]["strategy"]["type"] == "Recreate"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (
        ports["http"]
        == args.port
        == int(pod["metadata"]["annotations"]["prometheus.io/port"])
    )
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    selector = parts["Service"]["spec"]["selector"]
    assert (
        selector
        == parts["Deployment"]["spec"]["selector"]["matchLabels"]
        == pod["metadata"]["labels"]
    )
