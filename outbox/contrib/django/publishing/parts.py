"""The parts of a message under `@transactional_message`: values, or functions of the decorated function's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from outbox.contrib.django.subscribers.callables import is_asynchronous, is_generator, name_of, signature_of
from outbox.errors import ConfigurationError, UsageError

# The parameter of a part that receives the return value of the decorated function.
RESULT: Final = "result"

# The value of a part that was not given; None is a valid value.
NOT_GIVEN: Final[Any] = object()

# The parameter kinds that a caller cannot name.
_COLLECTING: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class MessagePart:
    """One property of the message: a value, or a function and the names of its arguments.

    `optional` are the arguments with a default. `others` names the `**kwargs` of the decorated function, where a name
    may also be found; '' without one.
    """

    what: str
    value: Any
    wanted: tuple[str, ...] | None = None
    optional: tuple[str, ...] = ()
    others: str = ""

    @property
    def needs_result(self) -> bool:
        """Whether it can be built only after the function has run."""
        return self.wanted is not None and RESULT in (*self.wanted, *self.optional)

    def of(self, arguments: Mapping[str, Any], name: str) -> Any:
        """The value for one call of the function `name`. An error of the part is raised.

        Raises UsageError for an argument that was not passed.
        """
        if self.wanted is None:
            return self.value
        known = {**arguments.get(self.others, {}), **arguments}
        if lacking := [wanted for wanted in self.wanted if wanted not in known]:
            raise UsageError(
                f"{self.what}= of {name} needs {', '.join(map(repr, lacking))}, which this call did not pass by "
                "name. Nothing was published, and the transaction is rolled back: pass it, or give the part a "
                "default."
            )
        names = (*self.wanted, *self.optional)
        return self.value(**{wanted: known[wanted] for wanted in names if wanted in known})


def part(function: Callable[..., Any], what: str, value: Any, *, may_yield: bool = False) -> MessagePart:
    """The part `what` of the messages of `function`. Raises ConfigurationError for one that cannot be called.

    `may_yield`: it may be a generator, which runs to its end when the messages are built.
    """
    if not callable(value):
        return MessagePart(what, value)
    name = name_of(function)
    if is_asynchronous(value) or (is_generator(value) and not may_yield):
        raise ConfigurationError(
            f"{what}= of {name} is asynchronous or a generator: it is called when the message is built. Make it a "
            f"plain function of the parameters of {name}."
        )
    parameters = signature_of(function).parameters
    others = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), "")
    wanted: list[str] = []
    optional: list[str] = []
    for parameter in _parameters(name, what, value):
        can_be_given = parameter.kind is not parameter.POSITIONAL_ONLY and (
            bool(others) or parameter.name in (*parameters, RESULT)
        )
        if parameter.kind in _COLLECTING or (parameter.default is parameter.empty and not can_be_given):
            raise _unknown(name, what, parameter, parameters)
        if can_be_given:
            (wanted if parameter.default is parameter.empty else optional).append(parameter.name)
    return MessagePart(what, value, tuple(wanted), tuple(optional), others)


def _parameters(name: str, what: str, value: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(signature_of(value).parameters.values())
    except ValueError:
        raise ConfigurationError(
            f"{what}= of {name} is {value!r}, which has no readable signature: write a function of the parameters of "
            f"{name}, like `lambda order: {{'id': order.pk}}`, or a value."
        ) from None


def _unknown(name: str, what: str, parameter: inspect.Parameter, known: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{what}= of {name} is a function with the parameter {str(parameter)!r}: its parameters must be named like "
        f"those of {name} ({', '.join(known) or 'none'}), or 'result' for what it returned."
    )


def arguments_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one call by name, defaults included. Raises TypeError where the function would."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
