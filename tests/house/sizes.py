"""`make sizes`: lines of Python and SQL by room, and how much there is to know."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.house.parts import ROOT, owner, texts


def main() -> None:
    core: Counter[str] = Counter()
    of_parts: Counter[str] = Counter()
    for path, text in texts():
        if path.endswith((".py", ".sql")):
            part = owner(path)
            room = "/".join(path.split("/")[:-1][:3]) or "."
            (core if part is None else of_parts)[part or room] += text.count("\n")
    for title, rooms in (("core", core), ("parts", of_parts)):
        print(f"{title}: {rooms.total():,}")
        for room, count in sorted(rooms.items()):
            print(f"    {count:7,}  {room}")
    for folder in ("spark", "sample_project", "benchmarks", "tests"):
        print(f"{folder}: {lines(python(ROOT / folder)):,}")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    print(f"words of documents: {sum(len(text.split()) for text in map(read, pages)):,} on {len(pages)} pages")
    print(f"decisions: {len(list((ROOT / 'docs/decisions').glob('[0-9]*.md')))}")
    print(f"commands: {len(list((ROOT / 'outbox/contrib').glob('*/management/commands/outbox_*.py')))}")
    names = read(ROOT / "docs/maintainers/names.md").partition("## Settings")[2].partition("\n## ")[0]
    print(f"settings: {len(re.findall('^[|] `', names, re.MULTILINE))}")


def python(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.suffix in {".py", ".sql"} and "__pycache__" not in path.parts)


def lines(paths: Iterable[Path]) -> int:
    return sum(read(path).count("\n") for path in paths)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
