"""What builds a release refuses a wrong tag, and GitHub accepts the workflows (docs/maintainers/releasing.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def release(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "OUTBOX_REPOSITORY"} | environment
    command = ["bash", ".ci/release", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


def test_a_release_needs_a_tag_of_its_own_version_and_an_address() -> None:
    address = {"OUTBOX_REPOSITORY": "https://example.com/outbox"}
    for refused, said in [
        (release(**address), "which tag"),
        (release("v0.2.0"), "the address of the repository"),
        (release("v0.0.1", **address), "The tag is v0.0.1, but pyproject.toml says"),
    ]:
        assert refused.returncode != 0
        assert said in refused.stderr


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_github_accepts_the_workflows(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")

    def check(path: Path) -> int:
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert check(file) == 0
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(file.read_text().replace("runs-on:", "runs-off:"))
    assert check(wrong) == 1
