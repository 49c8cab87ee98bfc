"""No code formats an error of other code directly: its text may raise, be endless, or hold what no database stores."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent / "outbox"
# An `except` of these classes catches errors of handlers, codecs, look-ups, receivers, sinks and middleware.
FOREIGN: Final = {
    "Exception",
    "BaseException",
    "HandlerError",
    "HandlerNotStarted",
    "MiddlewareNotUsed",
    "PermanentError",
    "ServiceUnavailable",
    "StepRefused",
    "UndecodableBody",
}
# The crash kit runs beside a developer, who sees the traceback of the own scenario.
LEFT_OUT: Final = {"contrib/crash_kit/kit.py", "contrib/crash_kit/processes.py", "utils/safe_text.py"}


def _classes(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"BaseException"}
    found = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(one).rpartition(".")[2] for one in found}


def _is(node: ast.expr, name: str | None) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def formatted(tree: ast.AST) -> Iterator[int]:
    """The lines that format a foreign error, or log it without `printable`."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or not _classes(handler) & FOREIGN:
            continue
        name = handler.name
        for node in ast.walk(handler):
            if isinstance(node, ast.FormattedValue) and _is(node.value, name):
                yield node.lineno
            if isinstance(node, ast.Call) and _formats(node, name):
                yield node.lineno


def _formats(call: ast.Call, name: str | None) -> bool:
    called, is_given = ast.unparse(call.func), any(_is(one, name) for one in call.args)
    if "logger." in called:
        logged = [ast.unparse(one.value) for one in call.keywords if one.arg == "exc_info"]
        return is_given or called.endswith(".exception") or any("printable" not in one for one in logged)
    if called.startswith("traceback.") or called == "format_exception":
        return True
    return is_given and called in ("str", "repr", "format")


def test_a_foreign_error_is_formatted_by_the_functions_that_cannot_fail() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(ROOT.rglob("*.py"))
        if str(path.relative_to(ROOT)) not in LEFT_OUT
        for line in formatted(ast.parse(path.read_text()))
    }
    assert not found, "use shown_text, error_line or printable of outbox.utils.safe_text"


def test_the_control_finds_each_form() -> None:
    forms = [
        'f"{error}"', 'f"{error!r}"', "str(error)", "repr(error)", "traceback.format_exc()", "format_exception(error)",
        'logger.exception("x")', 'logger.info("%s", error)', 'logger.error("x", exc_info=True)',
        'logger.error("x", exc_info=error)',
    ]  # fmt: skip
    for kind in ("Exception", "(ValueError, ServiceUnavailable)", "errors.PermanentError"):
        for form in forms:
            tree = ast.parse(f"try:\n    pass\nexcept {kind} as error:\n    {form}\n")
            assert list(formatted(tree)) == [4], form
    allowed = "try:\n    pass\nexcept Exception as error:\n    logger.error('x', exc_info=printable(error))\n"
    assert not list(formatted(ast.parse(allowed)))
