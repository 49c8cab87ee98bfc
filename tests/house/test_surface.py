"""What users see changes only on purpose."""

from __future__ import annotations

from tests.house.surface import SURFACE, surface


def test_what_users_see_is_as_written() -> None:
    assert surface().splitlines() == SURFACE.read_text(encoding="utf-8").splitlines(), (
        "names, commands, settings, tables, conditions or pages differ: if that is wanted, tell it in CHANGELOG.md and "
        "run `python -m tests.house.surface`"
    )
