"""The peers' virtual environments, under var/peers: the packages of each, and how it is made."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "var" / "peers"

_COMMON = ("psycopg[binary]>=3.2,<4",)
_DJANGO = ("Django>=5.2,<6", *_COMMON)
PACKAGES: dict[str, tuple[str, ...]] = {
    "django-reliable-outbox": ("django-reliable-outbox==0.1.1", *_DJANGO),
    "procrastinate": ("procrastinate[django]>=3.2,<4", *_DJANGO),
    "pgmq": ("pgmq>=1.1,<2", *_COMMON),
    "celery": ("celery[redis]>=5.5,<6", *_DJANGO),
}
# Its type parameters are syntax of this version; nothing else in it is.
_RELIABLE_OUTBOX_SINCE = (3, 12)
_TYPE_PARAMETERS = re.compile(r"^(\s*(?:async )?(?:def|class) \w+)\[[^\]]*\]", re.MULTILINE)


def python_of(environment: str) -> Path:
    """Its interpreter. The empty environment is the one that runs this."""
    return FOLDER / environment / "bin" / "python" if environment else Path(sys.executable)


def missing(environment: str) -> bool:
    return bool(environment) and not (FOLDER / environment / ".installed").exists()


def install() -> None:
    """Make what is missing, with the interpreter that runs this, and print what is in each."""
    for environment, packages in PACKAGES.items():
        folder = FOLDER / environment
        if missing(environment):
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            _pip(folder, packages)
            if environment == "django-reliable-outbox" and sys.version_info < _RELIABLE_OUTBOX_SINCE:
                without_type_parameters(folder / _purelib() / "reliable_outbox")
            (folder / ".installed").touch()
        print(f"{environment}: {', '.join(_versions(folder, packages))}", flush=True)


def _pip(folder: Path, packages: tuple[str, ...]) -> None:
    options = ["--quiet", "--disable-pip-version-check"]
    if any(package.startswith("django-reliable-outbox") for package in packages):
        options += ["--ignore-requires-python"]
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", *options, *packages], check=True)


def _purelib() -> Path:
    """Where an environment has its packages, below its folder."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": ""}).lstrip("/"))


def without_type_parameters(package: Path) -> None:
    """Let it run on the older Python of the comparison: the removed code is for type checkers only."""
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        changed = _TYPE_PARAMETERS.sub(r"\1", text)
        if changed != text:
            if "from __future__ import annotations" not in changed:
                # Before the docstring would make it none, which nothing in this package reads.
                changed = f"from __future__ import annotations\n{changed}"
            path.write_text(changed, encoding="utf-8")


def _versions(folder: Path, packages: tuple[str, ...]) -> list[str]:
    names = {re.split(r"[\[<>=]", package)[0].lower() for package in packages}
    freeze = [str(folder / "bin" / "python"), "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"]
    listed = subprocess.run(freeze, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [line for line in listed.splitlines() if line.split("==")[0].lower() in names]
