"""The README is true: its program runs, on the wheel, in an environment that has nothing of this checkout."""

from __future__ import annotations

import email.message
import email.parser
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent


def quickstart() -> str:
    match = re.search(r"<!-- quickstart -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert match is not None
    return match[1]


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DJANGO_SETTINGS_MODULE")}
    return subprocess.run(command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    # A copy, so that building leaves nothing in the checkout.
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    source = tmp_path_factory.mktemp("source")
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), cwd=source)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment with the wheel and the dependencies, but without this checkout."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    installed = run(str(python), "-m", "pip", "install", "--no-deps", "--no-index", str(wheel), cwd=folder)
    assert installed.returncode == 0, installed.stderr
    # The dependencies from this environment; its .pth files, which lead to the checkout, are not followed.
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_carries_all_it_needs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tracked = subprocess.run(
        ["git", "ls-files", "outbox", "spark"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    expected = {re.sub(r"^spark/", "outbox_spark/", name) for name in tracked.stdout.split()}
    assert expected <= set(names)
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"outbox", "outbox_spark"}


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def test_wheel_says_whose_it_is_and_under_which_license(wheel: Path) -> None:
    said = metadata(wheel)
    assert said["License-Expression"] == "Apache-2.0"
    assert said.get_all("License-File") == ["LICENSE"]
    assert said["Author"] == "The outbox authors"
    assert str(said.get_payload()).strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text and "The outbox authors" in text


def test_versions_that_the_wheel_claims_are_those_it_accepts_and_cover_these(wheel: Path) -> None:
    said = metadata(wheel)
    classifiers = [value.split(" :: ") for value in said.get_all("Classifier", [])]
    pythons = {parts[2] for parts in classifiers if parts[:2] == ["Programming Language", "Python"] and "." in parts[2]}
    djangos = {parts[2] for parts in classifiers if parts[:2] == ["Framework", "Django"]}
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


def test_quick_start_runs_on_the_wheel(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "quickstart.py").write_text(quickstart())
    where = run(str(environment), "-c", "import outbox; print(outbox.__file__)", cwd=tmp_path)
    assert str(ROOT) not in where.stdout
    result = run(str(environment), "quickstart.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "welcome, alice" in result.stdout
    assert "bob" not in result.stdout


def test_reconciliation_command_is_installed(environment: Path, tmp_path: Path) -> None:
    result = run(str(environment.parent / "outbox-reconcile"), "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "usage: outbox-reconcile" in result.stdout


def test_core_imports_nothing_but_the_standard_library(tmp_path: Path) -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import outbox, outbox.memory, outbox.producer"
    result = run(sys.executable, "-I", "-S", "-c", program, str(ROOT), cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test", "help"} <= named <= targets
