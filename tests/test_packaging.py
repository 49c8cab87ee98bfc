"""The program of docs/quickstart.md runs on the wheel, in an environment that has nothing of this checkout."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.wheel import REPOSITORY, ROOT, Environments, build, build_in, metadata, run

PAGE = ROOT / "docs" / "quickstart.md"


def quickstart() -> str:
    match = re.search(r"<!-- quickstart -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


def test_wheel_carries_all_it_needs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tracked = subprocess.run(
        ["git", "ls-files", "outbox", "spark"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    expected = {re.sub(r"^spark/", "outbox_spark/", name) for name in tracked.stdout.split()}
    assert expected <= set(names)
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"outbox", "outbox_spark"}


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """PyPI's sdist is what distributions build from: it lacks no SQL file, template or py.typed."""
    sdist = build(tmp_path / "source", tmp_path, kind="--sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [source] = (tmp_path / "unpacked").iterdir()
    again = build_in(source, "--wheel", tmp_path / "again")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())
    assert source.name == f"outbox_transactional-{metadata(wheel)['Version']}"


def test_the_version_is_written_in_one_place(wheel: Path) -> None:
    version = metadata(wheel)["Version"]
    tracked = subprocess.run(
        ["git", "grep", "-lF", f'"{version}"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [name for name in tracked.stdout.split() if not name.startswith(("docs/", "tests/"))] == ["pyproject.toml"]


def test_wheel_names_its_authors_and_its_license(wheel: Path) -> None:
    said = metadata(wheel)
    assert said["License-Expression"] == "Apache-2.0"
    assert said.get_all("License-File") == ["LICENSE"]
    assert said["Author"] == "The outbox authors"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text and "The outbox authors" in text


def test_the_links_that_pypi_shows_lead_to_files_of_the_release(wheel: Path) -> None:
    said = metadata(wheel)
    shown, readme = str(said.get_payload()).strip(), (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert said["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"\]\(([^)\s]+)\)", shown)
    addresses = [url.partition(", ")[2] for url in said.get_all("Project-URL", [])]
    assert len(links) > 5 and len(addresses) == 4
    assert [link for link in links if "://" not in link] == []
    of_the_tag = re.compile(rf"{re.escape(REPOSITORY)}/(?:blob|raw)/v{re.escape(said['Version'])}/")
    files = [of_the_tag.sub("", link).partition("#")[0] for link in [*links, *addresses] if of_the_tag.match(link)]
    assert len(files) > 5 and [file for file in files if not (ROOT / file).exists()] == []
    assert of_the_tag.sub("", shown) == readme


def test_versions_that_the_wheel_claims_are_those_it_accepts_and_cover_these(wheel: Path) -> None:
    said = metadata(wheel)
    classifiers = [value.split(" :: ") for value in said.get_all("Classifier", [])]
    pythons = {parts[2] for parts in classifiers if parts[:2] == ["Programming Language", "Python"] and "." in parts[2]}
    djangos = {parts[2] for parts in classifiers if parts[:2] == ["Framework", "Django"] and len(parts) > 2}
    (accepted,) = (
        requirement.specifier
        for requirement in map(Requirement, said.get_all("Requires-Dist", []))
        if requirement.name == "django" and requirement.marker and requirement.marker.evaluate({"extra": "django"})
    )
    assert pythons == set(SpecifierSet(said["Requires-Python"]).filter(pythons))
    assert djangos == set(accepted.filter(djangos))
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in pythons
    assert ".".join(importlib.metadata.version("django").split(".")[:2]) in djangos


def test_the_oldest_versions_that_the_wheel_accepts_are_those_of_the_matrix(wheel: Path) -> None:
    script = (ROOT / ".ci" / "matrix").read_text(encoding="utf-8")
    match = re.search(r"^oldest_pins=\((.*)\)$", script, re.MULTILINE)
    assert match is not None
    pinned = {Requirement(text).name: Requirement(text).specifier for text in re.findall(r'"(.+?)"', match[1])}
    accepted = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, metadata(wheel).get_all("Requires-Dist", []))
        if requirement.name in pinned
    }
    assert {name: str(specifier).removeprefix(">=") for name, specifier in accepted.items()} == {
        name: str(specifier).removeprefix("==").removesuffix(".0") for name, specifier in pinned.items()
    }
    oldest = re.search(r"^oldest_pythons=\((.*)\)$", script, re.MULTILINE)
    assert oldest is not None
    assert metadata(wheel)["Requires-Python"] == f">={oldest[1]}"


def test_changelog_begins_with_the_version_of_the_wheel(wheel: Path) -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert next(name for name in headings if name != "Unreleased") == metadata(wheel)["Version"]


@pytest.mark.slow
def test_quick_start_runs_on_the_wheel(environments: Environments, tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    install = re.search(r"^pip install '(.+)'$", page.partition("<!-- quickstart -->")[0], re.MULTILINE)
    assert install is not None
    requirement = install[1].replace("/path/to/the/checkout", "outbox-transactional")
    python = str(environments.with_installed(requirement) / "python")
    (tmp_path / "quickstart.py").write_text(quickstart())
    where = run(python, "-c", "import outbox; print(outbox.__file__)", cwd=tmp_path)
    assert str(ROOT) not in where.stdout
    result = run(python, "quickstart.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "welcome, alice" in result.stdout
    assert "bob" not in result.stdout


@pytest.mark.slow
def test_reconciliation_command_is_installed(environments: Environments, tmp_path: Path) -> None:
    programs = environments.with_installed("outbox-transactional[spark]")
    result = run(str(programs / "outbox-reconcile"), "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "usage: outbox-reconcile" in result.stdout


def test_core_imports_only_the_standard_library(tmp_path: Path) -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import outbox, outbox.memory"
    result = run(sys.executable, "-I", "-S", "-c", program, str(ROOT), cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test", "help"} <= named <= targets


def test_the_readme_is_short_and_its_links_lead_to_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", readme) if "://" not in link}
    assert "docs/quickstart.md" in links and len(links) <= 12
    assert sorted(link for link in links if not (ROOT / link).exists()) == []
