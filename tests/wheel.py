"""The built wheel, and environments as a new user has them: the wheel, its requirements, nothing of this checkout."""

from __future__ import annotations

import email.message
import email.parser
import importlib.metadata
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command without what points to this checkout."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DJANGO_SETTINGS_MODULE")}
    return subprocess.run(command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, check=False)


# An address of a repository, as a release has one.
REPOSITORY = "https://code.example.org/outbox"


def build(source: Path, target: Path, *, kind: str = "--wheel") -> Path:
    """Build the wheel or the source distribution from a copy in `source`: nothing is left in the checkout."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return build_in(source, kind, target)


def build_in(source: Path, kind: str, target: Path) -> Path:
    """Build the wheel (`--wheel`) or the source distribution (`--sdist`) of a folder."""
    command = (sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", str(target))
    built = run(*command, cwd=source, OUTBOX_REPOSITORY=REPOSITORY)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("*.whl" if kind == "--wheel" else "*.tar.gz")
    return path


def metadata(wheel: Path) -> email.message.Message:
    """The metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


class Environments:
    """Environments by what was installed into them, each made once."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self._folder = folder
        self._made: dict[frozenset[str], Path] = {}
        unpacked = folder / "wheel"
        options = ("--no-deps", "--no-index", "--no-compile", "--target", str(unpacked))
        installed = run(sys.executable, "-m", "pip", "install", *options, str(wheel), cwd=folder)
        assert installed.returncode == 0, installed.stderr
        (self._wheel,) = importlib.metadata.distributions(path=[str(unpacked)])

    def with_installed(self, *requirements: str) -> Path:
        """The folder of programs after `pip install REQUIREMENTS`: links to the wheel and to all these lead to."""
        key = frozenset(requirements)
        if key not in self._made:
            folder = self._folder / str(len(self._made))
            venv.create(folder, symlinks=True)
            (site_packages,) = folder.glob("lib/python*/site-packages")
            for distribution in self._asked_for(requirements):
                _link(distribution, site_packages)
                _write_programs(distribution, folder / "bin" / "python")
            self._made[key] = folder / "bin"
        return self._made[key]

    def _asked_for(self, requirements: Iterable[str]) -> Iterator[importlib.metadata.Distribution]:
        waiting = [Requirement(text) for text in requirements]
        seen: set[tuple[str, str]] = set()
        while waiting:
            wanted = waiting.pop()
            name = canonicalize_name(wanted.name)
            own = name == self._wheel.metadata["Name"]
            distribution = self._wheel if own else importlib.metadata.distribution(name)
            assert distribution.version in wanted.specifier, wanted
            assert wanted.extras <= set(distribution.metadata.get_all("Provides-Extra", [])), wanted
            if (name, "") not in seen:
                yield distribution
            new = {(name, extra) for extra in ("", *wanted.extras)} - seen
            seen |= new
            asks = map(Requirement, distribution.requires or [])
            waiting += [one for one in asks if any(_applies(one, extra) for _, extra in new)]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _link(distribution: importlib.metadata.Distribution, site_packages: Path) -> None:
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        if not (site_packages / top).exists():
            (site_packages / top).symlink_to(Path(str(distribution.locate_file(top))))


def _write_programs(distribution: importlib.metadata.Distribution, python: Path) -> None:
    for entry in distribution.entry_points.select(group="console_scripts"):
        program = python.with_name(entry.name)
        program.write_text(
            f"#!{python}\nimport sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n"
        )
        program.chmod(0o755)
