"""Proves that the package works without some of its parts, in a copy of the tree without their folders and tests.

python -m tests.house.removal saga                imports, Django's checks, the quick start and mypy
python -m tests.house.removal saga tasks --suite  and the core's suite, in a copy without both
python -m tests.house.removal --all               a copy for each part that can be taken out
python -m tests.house.removal --turn              a copy without two parts, others after each commit
python -m tests.house.removal --together --suite  a copy without any part: the core alone passes its suite
python -m tests.house.removal --together --half   one half of the suite, and nothing else: the commit's hash says which
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from outbox.broker.embedded import URL_VARIABLE
from tests.house.parts import PARTS, ROOT, Part, owner

# The folders below tests/ about what the core does, beside some tests of parts. The others are about the documents and
# the tree as a whole, or about the sample project, which uses parts.
CORE_SUITE: Final = ("core", "contract", "broker", "django", "celery", "mistakes")
# Without this, the importer of an editable installation would find in the checkout what is missing in the copy.
_SITE: Final = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if not getattr(one, "__module__", "").startswith("__editable__")]
"""
# Around the program of the quick start. An error must not leave its server running.
_BEFORE: Final = """
import atexit
atexit.register(lambda: embedded.stop(folder))
said = []
print = lambda *words: said.append(words)
"""
_AFTER: Final = """
assert said == [("welcome,", "alice")], said
"""
# From the page's one database to two, as the page says below its program: the two-phase path.
_TWO_DATABASES: Final = {
    'create_database(server, "shop"))}': """create_database(server, "shop")),
               "broker": database_from_url(embedded.create_database(server, "broker"))},
    DATABASE_ROUTERS=["outbox.contrib.django.routers.BrokerRouter"]""",
    'OUTBOX={"': 'OUTBOX={"BROKER": "broker", "',
    'call_command("migrate", verbosity=0)': """call_command("migrate", verbosity=0)
call_command("migrate", database="broker", verbosity=0)""",
}
_SETTINGS: Final = 'django_settings_module = "sample_project.settings"'


class NotRemovable(Exception):
    """The rest does not work without these parts."""


def in_turn(parts: Sequence[Part], turn: int) -> list[Part]:
    """Two neighbours of the list, other ones with each turn."""
    return [parts[(turn + number) % len(parts)] for number in range(min(2, len(parts)))]


def left_to_the_next(files: Iterable[str], turn: int) -> list[str]:
    """One half of these files; the other one for an odd instead of an even turn."""
    return [file for file in files if zlib.crc32(file.encode()) % 2 != turn % 2]


def users(graph: Mapping[str, Iterable[str]]) -> dict[str, set[str | None]]:
    """Part -> the parts whose modules import or name one of its modules, with None for the core.

    The graph is that of tests/test_layers.py: imports inside functions and for type checking count too.
    """
    found: dict[str, set[str | None]] = {part.name: set() for part in PARTS}
    for module, targets in graph.items():
        for target in targets:
            used = part_of(target)
            if used is not None and used != part_of(module):
                found[used].add(part_of(module))
    return found


@functools.cache
def part_of(module: str) -> str | None:
    """The part that a module belongs to."""
    path = ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return owner(file.relative_to(ROOT / "outbox").as_posix()) if file.is_relative_to(ROOT / "outbox") else None


def said_uses(part: Part) -> set[str]:
    """The parts that the first docstring of a part names."""
    package = ROOT / "outbox" / part.paths[0] / "__init__.py"
    text = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) if package.is_file() else None
    return {one.name for one in PARTS if one is not part and one.name in (text or "").lower()}


def with_users(parts: Iterable[Part]) -> list[Part]:
    """These parts, and those that say that they need one of them."""
    taken = {part.name for part in parts}
    while more := {part.name for part in PARTS if part.name not in taken and said_uses(part) & taken}:
        taken |= more
    return [part for part in PARTS if part.name in taken]


class Copy:
    """The files of this tree that git knows or would add, in a folder, without those of the parts."""

    def __init__(self, folder: Path, parts: Iterable[Part]) -> None:
        self.folder = folder
        parts = with_users(parts)
        gone = [f"outbox/{path}" for part in parts for path in part.paths]
        gone += [f"tests/{path}" for part in parts for path in part.tests]
        listed = _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
        for name in listed:
            source = ROOT / name
            if not source.is_file() or any(name == one or (one[-1] == "/" and name.startswith(one)) for one in gone):
                continue
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # With its time, so that bytecode of the checkout is valid in the copy.
            shutil.copy2(source, target)
        for top in ("outbox", "tests"):
            for bytecode in (ROOT / top).rglob("__pycache__"):
                if (target := folder / bytecode.relative_to(ROOT)).parent.exists():
                    shutil.copytree(bytecode, target)
        (folder / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
        project = folder / "pyproject.toml"
        text = project.read_text(encoding="utf-8")
        assert _SETTINGS in text
        # The sample project may name the parts.
        of_the_copy = _SETTINGS.replace("sample_project.settings", "tests.house.small_project")
        project.write_text(text.replace(_SETTINGS, of_the_copy), encoding="utf-8")

    def run(self, *arguments: str, seconds: float = 120.0, quiet: bool = True) -> None:
        """Run Python in the copy. Raises NotRemovable with its output if it fails."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE if quiet else None,
            stderr=subprocess.STDOUT if quiet else None,
            text=True,
            timeout=seconds,
        )
        if done.returncode:
            raise NotRemovable(f"python {' '.join(arguments)}\n{done.stdout or ''}")

    def environment(self) -> dict[str, str]:
        """The variables of a process that finds this package in the copy only, and starts its own PostgreSQL."""
        of_the_caller = ("DJANGO_SETTINGS_MODULE", URL_VARIABLE)
        kept = {name: value for name, value in os.environ.items() if name not in of_the_caller}
        return {**kept, "PYTHONPATH": str(self.folder)}

    def check_imports(self) -> None:
        """Every module is imported, and Django's checks find nothing."""
        self.run("-m", "tests.house.small_project")

    def check_quick_start(self) -> None:
        """The program of docs/quickstart.md works, with one database and with two."""
        for program in self.quick_starts():
            self.run_quick_start(program)

    def quick_starts(self) -> tuple[str, str]:
        """The program with one database, and with two."""
        page = (self.folder / "docs" / "quickstart.md").read_text(encoding="utf-8")
        program = re.search(r"<!-- quickstart -->\n```python\n(.*?)```", page, re.DOTALL)
        assert program is not None
        with_two = program[1]
        for one, two in _TWO_DATABASES.items():
            assert with_two.count(one) == 1, one
            with_two = with_two.replace(one, two)
        return program[1], with_two

    def run_quick_start(self, program: str) -> None:
        """Run one of the two. Raises NotRemovable."""
        (self.folder / "quickstart.py").write_text(_BEFORE + program + _AFTER, encoding="utf-8")
        self.run("quickstart.py")

    def check_types(self) -> None:
        """mypy finds nothing."""
        # Copies share a cache, so that the second one takes less than the first.
        self.run("-m", "mypy", "--cache-dir", str(ROOT / "var" / "mypy-of-copies"), "outbox", seconds=600)

    def run_suite(self, workers: int, half: int | None) -> None:
        """The quick tests of the core pass, or those of one half of its files: of that with this turn."""
        folders = [f"tests/{name}" for name in CORE_SUITE if (self.folder / "tests" / name).exists()]
        of_parts = [f"tests/{path}" for part in PARTS for path in part.tests if path.startswith(CORE_SUITE)]
        left = [f"--ignore={path}" for path in of_parts if (self.folder / path).exists()]
        if half is not None:
            files = [path.relative_to(self.folder).as_posix() for path in self.folder.glob("tests/**/test_*.py")]
            left += [f"--ignore={file}" for file in left_to_the_next(files, half)]
        quick = "not soak and not slow and not browser and not whole"
        arguments = ["-m", "pytest", "-p", "no:cacheprovider", "-m", quick, "-n", str(workers), *left, *folders]
        self.run(*arguments, seconds=4 * 3600, quiet=False)


def prove(parts: Sequence[Part], *, suite: bool, half: int | None, workers: int) -> None:
    """Make a copy without these parts, and prove all, or one half of the suite. Raises NotRemovable."""
    names = ", ".join(part.name for part in with_users(parts))
    title = "without any part" if len(parts) == len(PARTS) else f"without {names}"
    with tempfile.TemporaryDirectory(prefix="outbox-copy-") as folder:
        copy = Copy(Path(folder), parts)
        checks = (copy.check_imports, copy.check_quick_start, copy.check_types) if half is None else ()
        for check in checks:
            began = time.monotonic()
            check()
            print(f"{title}, {time.monotonic() - began:.0f} s: {check.__doc__}", flush=True)
        if suite or half is not None:
            copy.run_suite(workers, half)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *(part.name for part in PARTS)], metavar="PART")
    parser.add_argument("--all", action="store_true", help="each part that can be taken out, one after the other")
    parser.add_argument("--turn", action="store_true", help="two parts, by the number of commits")
    parser.add_argument("--together", action="store_true", help="all parts, in one copy")
    parser.add_argument("--suite", action="store_true", help="also run the quick tests of the core in the copy")
    parser.add_argument("--half", action="store_true", help="run one half of them only, by the hash of the commit")
    parser.add_argument("--workers", type=int, default=4, help="of pytest")
    given = parser.parse_args()
    sets = [[part for part in PARTS if part.name in given.parts]] if given.parts else []
    if given.all:
        sets += [[part] for part in PARTS]
    if given.turn:
        sets.append(in_turn(PARTS, int(_git("rev-list", "--count", "HEAD"))))
    if given.together:
        sets.append(list(PARTS))
    try:
        for parts in sets:
            # If each change had two commits, their number would always choose the same half.
            half = int(_git("rev-parse", "HEAD"), 16) if given.half else None
            prove(parts, suite=given.suite, half=half, workers=given.workers)
    except NotRemovable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
