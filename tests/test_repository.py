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


@pytest.mark.parametrize(("name", "project"), [("train", "."), ("line", "lit_inspect")])
def test_what_an_image_installs_and_starts_is_there(name: str, project: str) -> None:
    lines = (ROOT / f"docker/{name}.Dockerfile").read_text().splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert {step[0] for step in steps} <= {
        "FROM",
        "ARG",
        "WORKDIR",
        "RUN",
        "COPY",
        "ENV",
        "USER",
        "ENTRYPOINT",
        "CMD",
    }
    arguments = dict(step[1].split("=", 1) for step in steps if step[0] == "ARG")
    stated = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]
    copied = []
    for command, rest in steps:
        if command == "COPY":
            copied += rest.split()[:-1]
        if command == "ENTRYPOINT":
            assert rest.strip('[]"') in stated["scripts"]
    assert all((ROOT / source).exists() for source in copied)
    installs = [rest for command, rest in steps if command == "RUN"]
    assert all(re.match(r"pip install --no-cache-dir \S", rest) for rest in installs)
    if name == "line":
        assert installs == ["pip install --no-cache-dir ./lit_inspect"]
        return
    assert installs[-1].endswith('".[${EXTRAS}]"')
    assert set(arguments["EXTRAS"].split(",")) <= stated["optional-dependencies"].keys()
    # What the build of the package reads, and the packages themselves.
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "lit_data", "lit_inspect"} == set(
        copied
    )


def test_no_stray_file_or_cache_is_committed() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no checkout of Git")
    tops = {path.split("/")[0] for path in listed.stdout.splitlines()}
    visible = {top for top in tops if not top.startswith(".")}
    folders = {"benchmarks", "callbacks", "conf", "docker", "docs", "lit_data", "lit_inspect"}
    assert visible - folders - {"notebooks", "tests"} == {
        "BENCHMARKS.md",
        "CITATION.cff",
        "CODE_OF_CONDUCT.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "MANIFEST.in",
        "README.md",
        "SECURITY.md",
        "pyproject.toml",
        "setup.py",
    }
