"""Exceptions whose text, causes or attributes are broken, for the tests of every place that meets a foreign error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from outbox.errors import PermanentError, RetryLater, ServiceUnavailable


class BrokenText(Exception):
    """The ordinary mistake: a text that is a number."""

    code = 5

    def __str__(self) -> str:
        return self.code  # type: ignore[return-value]


class RaisingText(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")

    __repr__ = __str__


class EndingText(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class EndlessText(Exception):
    def __str__(self) -> str:
        return str(self)


class HugeText(Exception):
    def __str__(self) -> str:
        return "x" * 30_000_000


class UnstorableText(Exception):
    def __str__(self) -> str:
        return "nul \x00 and half an emoji \ud83d"


class _Text(str):
    def __len__(self) -> int:
        raise ValueError("no length")

    __getitem__ = __format__ = encode = strip = __len__  # type: ignore[assignment]


class TextOfASubclass(Exception):
    def __str__(self) -> str:
        return _Text("a text of a subclass")


class Value:
    """A value whose repr() fails, as an argument of an ordinary exception."""

    def __repr__(self) -> str:
        raise LookupError("no repr")


class RaisingCause(Exception):
    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise ValueError("no cause")

    __context__ = __suppress_context__ = __notes__ = args = __cause__


class RaisingTraceback(Exception):
    @property
    def __traceback__(self) -> Any:  # type: ignore[override]
        raise ValueError("no traceback")


class RaisingAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise ValueError(f"no {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError(f"no {name}")


class RaisingClass(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise ValueError("no class")


class _Meta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise ValueError("no name")


class NamelessClass(Exception, metaclass=_Meta):
    pass


@dataclass
class Compared(Exception):
    """A dataclass compares and has no hash."""

    order: int

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")

    __reduce_ex__ = __reduce__  # type: ignore[assignment]


class BrokenPermanent(PermanentError):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


class BrokenService(ServiceUnavailable):
    """A subclass that does not call the constructor, and has no text."""

    def __init__(self, code: int) -> None:
        self.code = code

    __str__ = BrokenText.__str__


def _chained() -> Exception:
    error = ValueError("the last of a chain")
    error.__cause__ = RaisingCause()
    error.add_note("a note")
    error.__notes__.append(Value())  # type: ignore[arg-type]
    return error


def _later() -> Exception:
    return RetryLater("later", level="soon")  # type: ignore[arg-type]


def _paused(seconds: Any) -> Exception:
    return ServiceUnavailable("away", pause_seconds=seconds)


# Each makes an exception that counts as a failed attempt, and is tried again.
FAILURES: dict[str, Callable[[], BaseException]] = {
    "BrokenText": BrokenText,
    "RaisingText": RaisingText,
    "EndingText": EndingText,
    "EndlessText": EndlessText,
    "HugeText": HugeText,
    "UnstorableText": UnstorableText,
    "TextOfASubclass": TextOfASubclass,
    "ValueError": lambda: ValueError(Value()),
    "RuntimeError": _chained,
    "RaisingCause": RaisingCause,
    "RaisingTraceback": RaisingTraceback,
    "RaisingAttributes": RaisingAttributes,
    "RaisingClass": RaisingClass,
    "NamelessClass": NamelessClass,
    "Compared": lambda: Compared(1),
    "Unpicklable": Unpicklable,
    "ExceptionGroup": lambda: ExceptionGroup("several", [BrokenText(), RaisingCause()]),
    "RetryLater": _later,
    "ServiceUnavailable text": lambda: _paused("a while"),
    "ServiceUnavailable nan": lambda: _paused(float("nan")),
    "ServiceUnavailable for ever": lambda: _paused(float("inf")),
    "ServiceUnavailable decimal": lambda: _paused(Decimal("0.1")),
}
