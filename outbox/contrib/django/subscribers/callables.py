"""What kind of thing a decorator was given: plain or async, with which parameters, under which name.

Python's own questions see functions only. Asked here are also what `functools.partial` fills in, objects with a
`__call__`, and views that Django has marked as asynchronous.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from asgiref.sync import iscoroutinefunction

from outbox.errors import TransactionUsageError

# Where django.utils.decorators.method_decorator tries a decorator on a function of its own.
_METHOD_DECORATOR: Final = "django.utils.decorators"


def is_asynchronous(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    return any(iscoroutinefunction(part) for part in _layers(function))


def is_generator(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a generator, synchronous or not."""
    return any(inspect.isgeneratorfunction(part) or inspect.isasyncgenfunction(part) for part in _layers(function))


def _layers(function: Any) -> list[Any]:
    """The function, and what it calls in the end: behind partial, a bound method or `__call__`."""
    layers = [function]
    while (inner := _inner(layers[-1])) is not None:
        layers.append(inner)
    return layers


def _inner(function: Any) -> Any:
    if isinstance(function, functools.partial):
        return function.func
    if inspect.ismethod(function):
        return function.__func__
    if inspect.isroutine(function) or inspect.isclass(function):
        return None
    return getattr(type(function), "__call__", None)  # noqa: B004


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters that a caller fills in. Raises ValueError for what does not tell (`dict`, some built-ins)."""
    if isinstance(function, functools.partial):
        # method_decorator gives its partial the name of the method, and Python then takes the method's signature.
        function = functools.partial(function.func, *function.args, **function.keywords)
    return inspect.signature(function)


def name_of(function: Any) -> str:
    """`module.function`, for errors and logs."""
    named = _named(function)
    return f"{named.__module__}.{named.__qualname__}"


def path_of(function: Any) -> str:
    """`module:function`, by which another process finds it."""
    named = _named(function)
    return f"{named.__module__}:{named.__qualname__}"


def has_a_name(function: Any) -> bool:
    """Whether the name is its own, not that of what it is made of, and not one that Django tries a decorator on."""
    return hasattr(function, "__qualname__") and not is_stand_in(function)


def is_stand_in(function: Any) -> bool:
    """Whether this is what `method_decorator` shows a decorator instead of the method."""
    return getattr(function, "__module__", "") == _METHOD_DECORATOR


def _named(function: Any) -> Any:
    while not hasattr(function, "__qualname__"):
        function = function.func if isinstance(function, functools.partial) else type(function)
    return function


def refuse_work_to_come(result: Any, name: str) -> None:
    """Raise TransactionUsageError for a result whose work is still to be done: it would run after the transaction."""
    if inspect.iscoroutine(result):
        # Nobody will wait for it; Python would warn of that, somewhere else.
        result.close()
    elif not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    raise TransactionUsageError(
        f"{name} returned a {type(result).__name__}, whose work would be done after the transaction has committed. It "
        f"was rolled back. Declare it as `async def` and await in it, or do the work (list(…)) before it returns."
    )
