"""Finds out of a decorated callable whether it is async, which parameters it has, and its name.

Python's `inspect` handles plain functions only. The functions of this module also handle `functools.partial`, objects
with a `__call__`, and views that Django has marked as asynchronous.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from asgiref.sync import iscoroutinefunction

from outbox.errors import TransactionUsageError


def is_asynchronous(function: Callable[..., Any]) -> bool:
    """Return whether a call of the function returns a coroutine."""
    return any(iscoroutinefunction(part) for part in _layers(function))


def is_generator(function: Callable[..., Any]) -> bool:
    """Return whether a call of the function returns a generator, synchronous or asynchronous."""
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
    """Return the signature that a caller sees.

    Raises ValueError for `dict` and some built-ins, because their signature cannot be read.
    """
    if isinstance(function, functools.partial):
        # method_decorator makes a partial and copies the method's attributes to it, so Python would return the
        # signature of the method. A new partial does not have these attributes.
        function = functools.partial(function.func, *function.args, **function.keywords)
    return inspect.signature(function)


def namespace_of(function: Any) -> dict[str, Any]:
    """Return the global names of the module of a callable, for annotations that are texts."""
    plain = inspect.unwrap(_layers(function)[-1])
    return getattr(plain, "__globals__", {})


def name_of(function: Any) -> str:
    """Return `module.function`, for errors and logs."""
    named = _named(function)
    return f"{named.__module__}.{named.__qualname__}"


def path_of(function: Any) -> str:
    """Return `module:function`, the path by which another process can find the function."""
    named = _named(function)
    return f"{named.__module__}:{named.__qualname__}"


def definition_of(function: Any) -> object:
    """Return what tells callables of one name apart. A reload of their module makes an equal value."""
    layers = _layers(function)
    plain = inspect.unwrap(layers[-1])
    states: list[object] = []
    for layer in layers[:-1]:
        if isinstance(layer, functools.partial):
            states.append((layer.args, layer.keywords))
        else:
            states.append(_state(getattr(layer, "__self__", layer)))
    # A decorator without functools.wraps gives the same name to all functions that it decorates.
    enclosed = [path_of(value) for value in _enclosed(plain) if callable(value)]
    return getattr(plain, "__code__", None), enclosed, states


def _enclosed(function: Any) -> Iterator[object]:
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # The name of a function that is being decorated has no value yet.
            yield cell.cell_contents


def _state(owner: object) -> object:
    return path_of(owner) if inspect.isclass(owner) else getattr(owner, "__dict__", None)


def _named(function: Any) -> Any:
    while not hasattr(function, "__qualname__"):
        function = function.func if isinstance(function, functools.partial) else type(function)
    return function


def refuse_work_to_come(result: Any, name: str) -> None:
    """Raise TransactionUsageError for a coroutine or a generator as result, because its work would run after COMMIT."""
    if inspect.iscoroutine(result):
        # No caller will await the coroutine. Without `close`, Python would warn that the coroutine was never awaited.
        result.close()
    elif not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    raise TransactionUsageError(
        f"{name} returned a {type(result).__name__}, whose work would be done after the transaction has committed. "
        "The transaction was rolled back. Declare the function as `async def` and await the coroutine in it, or do "
        "the work of the generator before the function returns, for example with list(…)."
    )
