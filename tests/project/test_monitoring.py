"""The files of deploy/monitoring/: alerts, their runbooks, and what is made of them."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess

import pytest
import yaml

from testbed import ROOT, WAIT_S

FOLDER = ROOT / "deploy" / "monitoring"
RUNBOOKS = "docs/runbooks.md"
ALERTS = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]


def test_dashboard_and_rule_of_the_operator_are_made_of_the_sources() -> None:
    made = runpy.run_path(str(FOLDER / "generate.py"))["files"]()
    assert {name: (FOLDER / name).read_text() for name in made} == made, "run deploy/monitoring/generate.py"
    rule = yaml.safe_load(made["prometheusrule.yaml"])
    assert rule["spec"] == yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    panels = json.loads(made["dashboard.json"])["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == [
        "Node",
        "Cluster",
        "Jobs by rank",
        "Source",
        "Cost",
    ]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_each_alert_has_its_section_of_the_runbooks() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / RUNBOOKS).read_text(), re.MULTILINE)
    assert sections == [alert["alert"] for alert in ALERTS]
    for alert in ALERTS:
        assert alert["annotations"]["runbook"] == f"{RUNBOOKS}#{alert['alert'].lower()}"


def test_each_alert_is_fired_by_a_test() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    asked = [each for test in tests for each in test["alert_rule_test"]]
    for fires in (True, False):
        named = {each["alertname"] for each in asked if bool(each.get("exp_alerts")) == fires}
        assert named == {alert["alert"] for alert in ALERTS}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian's package prometheus)")
@pytest.mark.parametrize(
    "command", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")]
)
def test_promtool_agrees_with_the_alerts(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
