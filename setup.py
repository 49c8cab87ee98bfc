"""The packages of the wheel: `outbox`, and the folder `spark/` as `outbox_spark`. The rest is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["outbox", "outbox.*"]),
        *(f"outbox_{name}" for name in find_packages(include=["spark", "spark.*"])),
    ],
    package_dir={"outbox_spark": "spark"},
)
