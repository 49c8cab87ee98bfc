"""A part adds a role of worker processes with a hook, and the core runs it like its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from django.core.management import CommandError, call_command

from outbox import hooks
from outbox.contrib.django.worker import child, roles
from outbox.contrib.django.worker.roles import child_specs, known_roles
from outbox.errors import ConfigurationError

ran: list[tuple[str, Sequence[str]]] = []
needed = [True]


def run(stop: threading.Event, names: Sequence[str]) -> None:
    ran.append(("run", names))


def drain(names: Sequence[str]) -> str:
    ran.append(("drain", names))
    return "two greetings sent"


def is_needed() -> bool:
    return needed[0]


@pytest.fixture(autouse=True)
def greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The role `greet` of a part, with an option of its own."""
    monkeypatch.setattr(roles, "refuse_processes_in_tests", lambda: None)
    role = hooks.Role(
        "greet everybody",
        run=f"{__name__}.run",
        drain=f"{__name__}.drain",
        option="guest",
        is_needed=f"{__name__}.is_needed",
    )
    monkeypatch.setitem(hooks.roles, "greet", role)
    ran.clear()
    needed[0] = True


def names(*of: str) -> list[str]:
    return [spec.name for spec in child_specs(of)]


def test_a_worker_starts_a_process_for_it_if_it_is_needed() -> None:
    assert "greet" in names() and "greet" in known_roles()
    [spec] = child_specs(["greet"])
    assert (spec.name, spec.argv[3:], spec.on_death) == ("greet", ["greet"], None)
    needed[0] = False
    assert "greet" not in names() and names("greet") == ["greet"]
    with pytest.raises(ConfigurationError, match=r"there is no role great; choose from broker, .*greet"):
        child_specs(["great"])


def test_its_process_runs_its_function() -> None:
    child.run_roles(["greet"], threading.Event(), groups=[])
    assert ran == [("run", [])]
    with pytest.raises(ConfigurationError, match="there is no role great"):
        child.run_roles(["great"], threading.Event(), groups=[])


def test_the_command_passes_the_names_of_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("outbox_worker", "--role", "greet", "--guest", "ann", "--guest", "bob")
    call_command("outbox_worker", "--role", "greet", "--drain")
    assert ran == [("run", ["ann", "bob"]), ("drain", [])]
    assert "two greetings sent" in capsys.readouterr().out
    with pytest.raises(CommandError, match="--guest needs --role greet"):
        call_command("outbox_worker", "--role", "consumer", "--guest", "ann")
    with pytest.raises(CommandError, match="--group needs --role consumer"):
        call_command("outbox_worker", "--role", "greet", "--group", "ann")


def test_a_role_without_drain_refuses_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.roles, "greet", hooks.Role("greet everybody", run=f"{__name__}.run"))
    with pytest.raises(CommandError, match="--drain does the work of all roles"):
        call_command("outbox_worker", "--role", "greet", "--drain")
