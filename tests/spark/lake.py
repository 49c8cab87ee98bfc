"""A PySpark with Delta Lake and Iceberg in a folder of its own. Pip brings the PySpark, Maven brings the jars.

Both follow a new Spark months later, so the newest PySpark, which the other tests use, may have neither.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

PYSPARK: Final = "4.1.1"
FOLDER: Final = Path(__file__).resolve().parents[2] / "var" / f"lake-{PYSPARK}"
_JARS: Final = (
    "io.delta:delta-spark_4.1_2.13:4.3.1",
    "io.delta:delta-storage:4.3.1",
    "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0",
)


def python_path() -> str:
    """The folder to put first on PYTHONPATH. Fetched once for all processes; skips the test where that cannot be."""
    _fetch()
    return str(FOLDER / "python")


def jars() -> str:
    """The value of spark.jars."""
    _fetch()
    return ",".join(str(path) for path in sorted((FOLDER / "jars").glob("*.jar")))


def _fetch() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (FOLDER / "complete").exists():
            return
        copy_jars(_JARS, FOLDER / "jars", "Delta Lake and Iceberg")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        done = subprocess.run([*pip, "--target", FOLDER / "python", f"pyspark=={PYSPARK}"], check=False)
        if done.returncode != 0:
            pytest.skip(f"pip cannot fetch pyspark {PYSPARK}, which Delta Lake and Iceberg need")
        (FOLDER / "complete").touch()


def copy_jars(alone: Sequence[str], target: Path, what: str, complete: Sequence[str] = ()) -> None:
    """Copy jars into `target`: those of `alone`, and those of `complete` with all that they depend on.

    If Java or Maven is missing, or Maven cannot fetch the jars, skip the test and name the cause.
    """
    if missing := [name for name in ("java", "mvn") if shutil.which(name) is None]:
        pytest.skip(f"the tests of {what} need {' and '.join(missing)} on the PATH")
    target.mkdir(parents=True, exist_ok=True)
    none = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
    listed = "".join(
        "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>".format(*name.split(":"))
        + f"{'' if name in complete else none}</dependency>"
        for name in (*alone, *complete)
    )
    (target / "pom.xml").write_text(
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>outbox</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{listed}</dependencies></project>"
    )
    goal = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={target}"]
    if subprocess.run(goal, cwd=target, check=False, stdout=subprocess.DEVNULL).returncode != 0:
        pytest.skip(f"Maven cannot fetch the jars of {what}")
