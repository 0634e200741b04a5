"""Files that services read: workflows, forms of issues, hooks before a commit."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS = {
    ".github/workflows/ci.yml": "github-workflows",
    ".github/dependabot.yml": "dependabot",
    ".github/ISSUE_TEMPLATE/bug.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/feature.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
    "CITATION.cff": "citation-file-format",
}


@pytest.mark.parametrize(("file", "schema"), SCHEMAS.items())
def test_files_of_services_fit_their_schema(file: str, schema: str) -> None:
    pytest.importorskip("check_jsonschema", reason="comes with the extra dev")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    ended = subprocess.run([*command, ROOT / file], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


def test_hooks_before_a_commit_are_valid() -> None:
    pytest.importorskip("pre_commit", reason="comes with the extra dev")
    command = [sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


def test_each_check_of_a_landing_runs_in_the_workflow() -> None:
    checks = (ROOT / ".ci/run").read_text()
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    commands = re.findall(r"^(?:ruff|mypy|python \.ci|python -m pytest).*", checks, re.MULTILINE)
    assert len(commands) > 5
    for command in commands:
        assert f"- run: {command.strip()}\n" in workflow


def test_pythons_of_the_workflow_are_those_that_the_package_states() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = "Programming Language :: Python :: "
    stated = [text.removeprefix(name) for text in project["classifiers"] if text.startswith(name)]
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == stated
