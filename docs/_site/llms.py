"""llms.txt and llms-full.txt beside the pages of the site: the list of the pages, and all of their text."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx


def listed(docs: Path) -> str:
    """One line for each page: its title and its address on the site."""
    lines = [f"- [{_title(page)}]({page.relative_to(docs).with_suffix('.html').as_posix()})" for page in _pages(docs)]
    return "\n".join(
        ["# outbox", "", "> Transactional messages for Django and PostgreSQL.", "", "## Pages", "", *lines, ""]
    )


def full(docs: Path) -> str:
    """The text of all pages, each after its path."""
    return "\n".join(
        f"<!-- {page.relative_to(docs).as_posix()} -->\n\n{page.read_text(encoding='utf-8')}" for page in _pages(docs)
    )


def _pages(docs: Path) -> list[Path]:
    return sorted(docs.rglob("*.md"), key=lambda page: (page.name != "index.md", page.as_posix()))


def _title(page: Path) -> str:
    lines = page.read_text(encoding="utf-8").splitlines()
    return next((line[2:] for line in lines if line.startswith("# ")), page.stem)


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        docs = Path(app.srcdir)
        (Path(app.outdir) / "llms.txt").write_text(listed(docs), encoding="utf-8")
        (Path(app.outdir) / "llms-full.txt").write_text(full(docs), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Write both files at the end of a build."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
