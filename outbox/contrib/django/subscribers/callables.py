"""Examines a decorated callable: whether it is async, its parameters, and its name.

Python's `inspect` handles plain functions only. The functions of this module also handle `functools.partial`, objects
with a `__call__`, and views that Django has marked as asynchronous.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from asgiref.sync import iscoroutinefunction

from outbox.errors import TransactionUsageError

# Django's method_decorator passes a stand-in function to a decorator. It defines the stand-in in this module.
_METHOD_DECORATOR: Final = "django.utils.decorators"


def is_asynchronous(function: Callable[..., Any]) -> bool:
    """Whether a call of the function returns a coroutine."""
    return any(iscoroutinefunction(part) for part in _layers(function))


def is_generator(function: Callable[..., Any]) -> bool:
    """Whether a call of the function returns a generator, synchronous or asynchronous."""
    return any(inspect.isgeneratorfunction(part) or inspect.isasyncgenfunction(part) for part in _layers(function))


def _layers(function: Any) -> list[Any]:
    """Return the function and every function that it calls through a partial, a bound method or `__call__`."""
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
    """Return the signature that a caller sees. Raises ValueError if it cannot be read (`dict`, some built-ins)."""
    if isinstance(function, functools.partial):
        # method_decorator gives its partial the method's name, so Python would read the method's signature.
        function = functools.partial(function.func, *function.args, **function.keywords)
    return inspect.signature(function)


def name_of(function: Any) -> str:
    """Return `module.function`, for errors and logs."""
    named = _named(function)
    return f"{named.__module__}.{named.__qualname__}"


def path_of(function: Any) -> str:
    """Return `module:function`, the path by which another process finds the function."""
    named = _named(function)
    return f"{named.__module__}:{named.__qualname__}"


def has_a_name(function: Any) -> bool:
    """Whether the callable has a name of its own.

    For a callable without a name of its own, `name_of` returns the name of its function or its class. The stand-in
    function of Django's method_decorator counts as a callable without a name.
    """
    return hasattr(function, "__qualname__") and not is_stand_in(function)


def is_stand_in(function: Any) -> bool:
    """Whether this is the function that `method_decorator` passes to a decorator in place of the method."""
    return getattr(function, "__module__", "") == _METHOD_DECORATOR


def _named(function: Any) -> Any:
    while not hasattr(function, "__qualname__"):
        function = function.func if isinstance(function, functools.partial) else type(function)
    return function


def refuse_work_to_come(result: Any, name: str) -> None:
    """Raise TransactionUsageError if the result is a coroutine or a generator: its work would run after the commit."""
    if inspect.iscoroutine(result):
        # Close the coroutine, because no caller will await it. Otherwise Python warns about it later.
        result.close()
    elif not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    raise TransactionUsageError(
        f"{name} returned a {type(result).__name__}, whose work would be done after the transaction has committed. It "
        f"was rolled back. Declare it as `async def` and await in it, or do the work (list(…)) before it returns."
    )
