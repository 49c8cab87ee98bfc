"""The packages of the wheel: `outbox`, and the folder `spark/` as `outbox_spark`. The rest is in pyproject.toml.

A release is built with OUTBOX_REPOSITORY, the address of the repository. PyPI shows README.md away from the repository,
so its links then lead to the files of the release's tag. Without the address, the links stay as they are.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+://|#)([^)\s]+)\)")


def with_absolute_links(readme: str, repository: str, version: str) -> str:
    """Let each link to a file lead to this file at the tag of the version, and each picture to its bytes."""

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}[{found[2]}]({repository}/{kind}/v{version}/{found[3]})"

    return _LINK.sub(absolute, readme)


def project_urls(repository: str, version: str) -> dict[str, str]:
    """The links beside the description on PyPI."""
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/v{version}/docs/index.md",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


if __name__ == "__main__":
    repository = os.environ.get("OUTBOX_REPOSITORY", "").rstrip("/")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        packages=[
            *find_packages(include=["outbox", "outbox.*"]),
            *(f"outbox_{name}" for name in find_packages(include=["spark", "spark.*"])),
        ],
        package_dir={"outbox_spark": "spark"},
        long_description=with_absolute_links(readme, repository, version) if repository else readme,
        long_description_content_type="text/markdown",
        project_urls=project_urls(repository, version) if repository else {},
    )
