"""The core works without its parts, and no part needs another one in silence.

A module that imports or names a missing one is found in the sources, for each part; what is found at run time only, in
one copy without all of them. There, `.ci/run` also runs the quick start, mypy and one half of the core's suite, and
before that the quick start and mypy in a copy without two parts: others after each commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.house.parts import PARTS
from tests.house.removal import Copy, NotRemovable, in_turn, left_to_the_next, said_uses, users
from tests.test_layers import MODULES, import_graph

LEADING = "outbox/broker/leading.py"
LEDGER = "outbox/contrib/django/ledger/ledger.py"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy without any part that can be taken out."""
    return Copy(tmp_path_factory.mktemp("core"), PARTS)


@pytest.fixture
def planted(core: Copy) -> Iterator[Mapping[str, str]]:
    """Files of the copy whose texts a test may change."""
    before = {name: (core.folder / name).read_text(encoding="utf-8") for name in (LEADING, LEDGER)}
    yield before
    for name, text in before.items():
        (core.folder / name).write_text(text, encoding="utf-8")


def test_nothing_uses_a_part_that_can_be_taken_out_without_saying_so() -> None:
    names = {part.name for part in PARTS}
    for used, by in users(import_graph(MODULES)).items():
        if used in names:
            assert by <= {part.name for part in PARTS if part.name not in names or used in said_uses(part)}, used


def test_control_a_use_is_found() -> None:
    """Inside a function, and as the path of a hook."""
    texts = {
        **dict.fromkeys(("outbox.contrib.saga.steps", "outbox.contrib.tasks.stranded"), "def mend(): pass"),
        "outbox.broker.leading": "def late():\n    from outbox.contrib.saga import steps",
        "outbox.contrib.saga.apps": 'hooks.add_pass("x", 1.0, "outbox.contrib.tasks.stranded.mend")',
    }
    found = users(import_graph(texts))
    assert (found["saga"], found["tasks"]) == ({None}, {"saga"})


def test_the_core_alone_is_imported(core: Copy) -> None:
    for part in PARTS:
        assert not any((core.folder / "outbox" / path).exists() for path in part.paths)
        assert not any((core.folder / "tests" / path).exists() for path in part.tests)
    core.check_imports()


def test_control_an_import_of_a_part_is_found(core: Copy, planted: Mapping[str, str]) -> None:
    (core.folder / LEADING).write_text(f"{planted[LEADING]}\nfrom outbox.contrib.saga import steps\n")
    with pytest.raises(NotRemovable, match=r"No module named 'outbox\.contrib\.saga'"):
        core.check_imports()


def test_control_a_statement_on_a_table_of_a_part_is_found(core: Copy, planted: Mapping[str, str]) -> None:
    values, plus_part = "VALUES ($1, 'C')", "SELECT $1, 'C' WHERE NOT EXISTS (SELECT FROM outbox_saga)"
    assert values in planted[LEDGER]
    (core.folder / LEDGER).write_text(planted[LEDGER].replace(values, plus_part), encoding="utf-8")
    _, with_two_databases = core.quick_starts()
    with pytest.raises(NotRemovable, match='relation "outbox_saga" does not exist'):
        core.run_quick_start(with_two_databases)


def test_each_part_has_its_turn() -> None:
    parts = PARTS[:5]
    taken = [in_turn(parts, turn) for turn in range(5)]
    assert all(len(set(both)) == 2 for both in taken)
    assert {part for both in taken for part in both} == set(parts)
    assert in_turn(parts[:1], 7) == [parts[0]]


def test_each_file_of_the_suite_has_its_turn() -> None:
    files = [f"tests/django/test_{number}.py" for number in range(20)]
    one, other = (left_to_the_next(files, turn) for turn in (6, 7))
    assert one and other and sorted([*one, *other]) == sorted(files)
    assert left_to_the_next(files, 8) == one
