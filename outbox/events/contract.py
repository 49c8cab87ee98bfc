"""The committed contracts: one file per event, with the schemas of its versions, and the check of today's types.

A version may have several revisions: schemas that understand each other. `write` adds a revision when a type has
changed in a way that the check allows. The check compares with all revisions, because messages of each may be stored.

Old and new code of a project run side by side, so each must read what the other writes. A comparison with the last
schema only would let a field go and come back with another type.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from outbox.errors import ConfigurationError
from outbox.events.compatibility import Difference, Schema, differences
from outbox.events.declaration import EventType, events, leads_to, schema_id

_SUFFIX: Final = ".json"
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class Revision:
    """One schema of a version. `accepted` differs from `written` only if the type reads more than it writes."""

    written: Schema
    accepted: Schema

    def as_json(self) -> dict[str, Any]:
        """Return the revision as it is stored."""
        return {"schema": self.written, **({} if self.accepted == self.written else {"accepts": self.accepted})}


@dataclass(slots=True)
class Contract:
    """The contract of one event: the revisions of its versions, oldest first."""

    name: str
    topic: str
    versions: dict[int, list[Revision]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the contract as it is stored."""
        return {
            "event": self.name,
            "topic": self.topic,
            "versions": {str(at): [one.as_json() for one in self.versions[at]] for at in sorted(self.versions)},
        }


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why `check` refuses today's types."""

    event: str
    version: int
    field: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        where = f" field {self.field}:" if self.field else ""
        return f"{self.event} version {self.version}:{where} {self.reason}. Remedy: {self.remedy}."


def declared_contracts() -> dict[str, Contract]:
    """Return the contracts of the types that this process declares, by event."""
    found: dict[str, Contract] = {}
    for one in events():
        contract = found.setdefault(one.name, Contract(one.name, one.topic))
        contract.topic = one.topic
        contract.versions[one.version] = [Revision(one.shape.written, one.shape.accepted)]
    return found


def read_contracts(folder: Path) -> dict[str, Contract]:
    """Return the committed contracts, by event. Raises ConfigurationError for a file that is no contract."""
    found: dict[str, Contract] = {}
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            versions = {
                int(at): [Revision(one["schema"], one.get("accepts", one["schema"])) for one in revisions]
                for at, revisions in given["versions"].items()
            }
            contract = Contract(given["event"], given["topic"], versions)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} is no contract of an event: {type(error).__name__}: {error}. Take the file back from your "
                "version control, or write it again with `manage.py outbox_contract write`."
            ) from error
        found[contract.name] = contract
    return found


def check(committed: Mapping[str, Contract], today: Mapping[str, Contract]) -> list[Problem]:
    """Return every reason why today's types break a reader of the committed contracts, or of stored messages."""
    problems = list(_not_written(committed, today))
    for name, old in sorted(committed.items()):
        new = today.get(name)
        for version, revisions in sorted(old.versions.items()):
            current = new.versions.get(version) if new is not None else None
            if new is not None and current is not None:
                for one in revisions:
                    problems += _of_one_version(name, version, one, current[-1])
            if new is None or version < max(new.versions):
                problems += _of_an_old_version(name, version, today)
            elif current is None:
                problems.append(
                    Problem(
                        name,
                        version,
                        "",
                        f"the code declares no version above {max(new.versions)}, but the version was committed",
                        "declare the version again: messages of it may be stored",
                    )
                )
    return list(dict.fromkeys(problems))


def _not_written(committed: Mapping[str, Contract], today: Mapping[str, Contract]) -> Iterator[Problem]:
    for name, contract in sorted(today.items()):
        known = committed.get(name)
        for version, [revision] in sorted(contract.versions.items()):
            if known is None or revision not in known.versions.get(version, ()):
                yield Problem(
                    name,
                    version,
                    "",
                    "the type is not in the committed contracts",
                    "run `manage.py outbox_contract write`, and commit the files",
                )
        if known is not None and known.topic != contract.topic:
            yield Problem(
                name,
                max(contract.versions),
                "",
                f"the topic was {known.topic!r} and is {contract.topic!r}, so the subscribers of the old topic get no "
                "more events",
                "keep the topic, or rename the event with @upcast(…, to=…)",
            )


def _of_one_version(name: str, version: int, old: Revision, new: Revision) -> Iterator[Problem]:
    for one in differences(new.accepted, old.written):
        yield _problem(name, version, "new code cannot read what old code has written", one)
    for one in differences(old.accepted, new.written):
        yield _problem(name, version, "old code cannot read what new code writes", one)


def _problem(name: str, version: int, direction: str, one: Difference) -> Problem:
    return Problem(name, version, one.field or "(the whole body)", f"{direction}: {one.reason}", one.remedy)


def _of_an_old_version(name: str, version: int, today: Mapping[str, Contract]) -> Iterator[Problem]:
    targets = [(other.name, max(other.versions)) for other in today.values()]
    if not any(leads_to((name, version), target) for target in targets):
        yield Problem(
            name,
            version,
            "",
            "messages of the version may be stored, and no function turns them into a newer version",
            f"declare @upcast({name!r}, {version}), or delete the version from the contract when no message of it is "
            "stored",
        )


def written(committed: Mapping[str, Contract], today: Mapping[str, Contract]) -> dict[str, Contract]:
    """Return the contracts to commit: the committed ones, with today's types added."""
    merged = {
        name: Contract(one.name, one.topic, {at: list(all_) for at, all_ in one.versions.items()})
        for name, one in committed.items()
    }
    for name, contract in today.items():
        known = merged.setdefault(name, Contract(name, contract.topic))
        known.topic = contract.topic
        for version, [revision] in contract.versions.items():
            revisions = known.versions.setdefault(version, [])
            if revision in revisions:
                revisions.remove(revision)
            revisions.append(revision)
    return merged


def write_contracts(folder: Path, contracts: Mapping[str, Contract]) -> list[Path]:
    """Write the contracts into the folder, and return the files that have changed."""
    folder.mkdir(parents=True, exist_ok=True)
    changed: list[Path] = []
    for name, contract in sorted(contracts.items()):
        path = folder / f"{name}{_SUFFIX}"
        text = json.dumps(contract.as_json(), indent=2, ensure_ascii=False) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def json_schema(one: EventType) -> dict[str, Any]:
    """Return the JSON Schema of the bodies of an event, as a document of its own for other teams."""
    title = f"{one.name} version {one.version}"
    return {"$schema": _DIALECT, "$id": schema_id(one.name, one.version), "title": title, **one.shape.written}
