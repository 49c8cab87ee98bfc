"""The handlers of tasks/running.py in every order of their steps and deaths: no entry is left without a message.

A handler's steps are those of the code: read the own entry, lock one, run it, announce the own entry again, commit. A
step sees what is committed, and skips what another handler has locked. `SAME_TIME` handlers run at a time, and any of
them dies at any point: its locks and writes are gone, and its message comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import pytest

SAME_TIME: Final = 3
MAX_DEATHS: Final = 2


@dataclass(frozen=True, order=True)
class Entry:
    """`fails`: how many attempts fail before one succeeds."""

    priority: int
    due: bool = True
    fails: int = 0
    attempts: int = 0
    ready: bool = True


@dataclass(frozen=True, order=True)
class Message:
    entry: int
    attempts: int


Phase = Literal["choose", "announce", "commit"]


@dataclass(frozen=True, order=True)
class Handler:
    """`runs`: the entry whose task it has run; `locks`: the entries it has locked; `again`: it announces its own."""

    message: Message
    phase: Phase = "choose"
    runs: int = -1
    locks: tuple[int, ...] = ()
    again: bool = False
    marks: bool = False


@dataclass(frozen=True)
class State:
    entries: tuple[Entry, ...]
    messages: tuple[Message, ...]
    handlers: tuple[Handler, ...] = ()
    deaths: int = 0

    def locked(self) -> set[int]:
        return {number for handler in self.handlers for number in handler.locks}

    def own(self, message: Message) -> Entry | None:
        """The entry that the message announces, if it still waits for it."""
        entry = self.entries[message.entry]
        return entry if entry.ready and entry.attempts == message.attempts else None

    def urgent(self, above: int) -> int:
        """The most urgent due entry above a priority that is free; -1 without one."""
        free = [
            number
            for number, entry in enumerate(self.entries)
            if entry.ready and entry.due and entry.priority > above and number not in self.locked()
        ]
        return max(free, key=lambda number: self.entries[number].priority, default=-1)

    def instead(self, old: Handler, new: Handler | None) -> State:
        handlers = list(self.handlers)
        handlers.remove(old)
        return replace(self, handlers=tuple(sorted([*handlers, *([new] if new else [])])))


Choose = Callable[[State, Handler], Handler]


def choose(state: State, handler: Handler) -> Handler:
    """As in running.py: one entry, a more urgent one or its own."""
    message = handler.message
    if (own := state.own(message)) is None:
        return replace(handler, phase="commit")
    if (urgent := state.urgent(own.priority)) >= 0:
        return replace(handler, phase="announce", runs=urgent, locks=(urgent,))
    if message.entry in state.locked():
        return replace(handler, phase="announce")
    return replace(handler, phase="commit", runs=message.entry, locks=(message.entry,))


def choose_and_mark_the_own_entry(state: State, handler: Handler) -> Handler:
    """The own entry is marked as due, which locks it, before a more urgent one is run. No message is sent again."""
    message, own = handler.message, state.own(handler.message)
    marks = own is not None and not own.due and message.entry not in state.locked()
    locks = (message.entry,) if marks else ()
    urgent = state.urgent(state.entries[message.entry].priority)
    if urgent < 0 and own is not None and message.entry not in state.locked():
        urgent = message.entry
    if urgent < 0:
        urgent = state.urgent(-1)
    runs = (urgent,) if urgent >= 0 else ()
    return replace(handler, phase="commit", runs=urgent, locks=tuple(sorted({*locks, *runs})), marks=marks)


def choose_without_announcing(state: State, handler: Handler) -> Handler:
    """As the first, but a message that finds its entry locked is done."""
    chosen = choose(state, handler)
    return replace(chosen, phase="commit") if chosen.runs < 0 else chosen


def steps(state: State, choosing: Choose) -> Iterator[State]:
    """All states that may follow."""
    if len(state.handlers) < SAME_TIME:
        for message in set(state.messages):
            left = list(state.messages)
            left.remove(message)
            handlers = tuple(sorted([*state.handlers, Handler(message)]))
            yield replace(state, messages=tuple(left), handlers=handlers)
    for handler in set(state.handlers):
        if handler.phase == "choose":
            yield state.instead(handler, choosing(state, handler))
        elif handler.phase == "announce":
            yield state.instead(handler, _announcing(state, handler))
        else:
            yield _committed(state, handler)
        if state.deaths < MAX_DEATHS:
            dead = state.instead(handler, None)
            yield replace(dead, messages=tuple(sorted([*dead.messages, handler.message])), deaths=state.deaths + 1)


def _announcing(state: State, handler: Handler) -> Handler:
    message, done = handler.message, replace(handler, phase="commit")
    if state.own(message) is None:
        return done
    if message.entry in state.locked():
        return replace(done, again=True)
    return replace(done, again=True, marks=True, locks=tuple(sorted([*handler.locks, message.entry])))


def _committed(state: State, handler: Handler) -> State:
    entries, messages = list(state.entries), list(state.messages)
    if handler.marks:
        entries[handler.message.entry] = replace(entries[handler.message.entry], due=True)
    if handler.again:
        messages.append(handler.message)
    if (number := handler.runs) >= 0:
        entry = entries[number]
        if entry.attempts < entry.fails:
            entries[number] = replace(entry, due=False, attempts=entry.attempts + 1)
            messages.append(Message(number, entry.attempts + 1))
        else:
            entries[number] = replace(entry, ready=False)
    state = state.instead(handler, None)
    return replace(state, entries=tuple(entries), messages=tuple(sorted(messages)))


def stranded(state: State) -> bool:
    """Whether an entry waits for a message that neither the broker nor a handler has."""
    known = {*state.messages, *(handler.message for handler in state.handlers)}
    return any(
        entry.ready and Message(number, entry.attempts) not in known for number, entry in enumerate(state.entries)
    )


def explore(entries: tuple[Entry, ...], choosing: Choose) -> tuple[int, list[State]]:
    """How many states there are, and those that are at rest while an entry is READY."""
    first = State(entries, tuple(Message(number, entry.attempts) for number, entry in enumerate(entries)))
    seen, todo, stuck = {first}, [first], []
    while todo:
        state = todo.pop()
        if not state.messages and not state.handlers and any(entry.ready for entry in state.entries):
            stuck.append(state)
        if choosing is choose:
            assert not stranded(state), state
        for following in steps(state, choosing):
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return len(seen), stuck


# A postponed entry, one that fails once, a more urgent one.
MIXED: Final = (Entry(0, due=False), Entry(0, fails=1), Entry(9))
PRIORITIES: Final = (Entry(0), Entry(5), Entry(9))


@pytest.mark.parametrize("entries", [MIXED, PRIORITIES], ids=["mixed", "priorities"])
def test_every_ready_entry_has_a_message_at_every_moment(entries: tuple[Entry, ...]) -> None:
    states, stuck = explore(entries, choose)
    assert states > 1000
    assert stuck == []


@pytest.mark.parametrize(
    ("control", "entries"), [(choose_and_mark_the_own_entry, MIXED), (choose_without_announcing, PRIORITIES)]
)
def test_the_alternatives_strand_entries(control: Choose, entries: tuple[Entry, ...]) -> None:
    _, stuck = explore(entries, control)
    assert stuck
