"""What users see changes only on purpose."""

from __future__ import annotations

from difflib import unified_diff

from tests.house.surface import SURFACE, surface


def test_what_users_see_is_as_written() -> None:
    written = SURFACE.read_text(encoding="utf-8").splitlines()
    changed = [*unified_diff(written, surface().splitlines(), "surface.txt", "the code", n=0, lineterm="")]
    assert not changed, (
        "names, commands, settings, tables, conditions or pages differ: if that is wanted, tell it in CHANGELOG.md and "
        "run `python -m tests.house.tables`\n" + "\n".join(changed)
    )
