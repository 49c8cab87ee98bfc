"""How `make test` gives tests to its workers, and what it does about what they leave."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import leftovers
from tests.conftest import unit_of_work

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Pytest on a suite of its own, with the hooks of this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SPARK_LOCAL"))}
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-p", "tests.conftest", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def write(folder: Path, **files: str) -> None:
    (folder / "pytest.ini").write_text("[pytest]\nleftover_seconds = 0.1\n")
    for name, text in files.items():
        path = folder / "tests" / name / f"test_{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.slow
def test_what_uses_spark_is_shared_by_two_workers(tmp_path: Path) -> None:
    """All tests of a file and its session on one worker; tests without a session go to any free worker."""
    nine = "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_one(n): pass\n"
    write(tmp_path, spark="# spark_session\n" + nine, free=nine)
    (tmp_path / "tests" / "spark" / "test_more.py").write_text("# reconcile: Reconciler\n" + nine)
    (tmp_path / "tests" / "spark" / "test_none.py").write_text(nine)
    done = run("-n", "3", "-v", "-o", "spark_workers=2", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"^\[(gw\d)\].* PASSED tests/\w+/test_(\w+)\.py", done.stdout, re.MULTILINE)
    assert sorted(place for _, place in ran) == sorted(["free", "spark", "more", "none"] * 9)
    of = {place: {worker for worker, name in ran if name == place} for _, place in ran}
    assert {len(of[name]) for name in ("spark", "more")} == {1}
    assert of["spark"] != of["more"]
    assert len(of["free"] | of["none"]) > 1


def test_tests_that_share_a_fixture_stay_on_one_worker(tmp_path: Path) -> None:
    write(tmp_path, alone="", shared='@pytest.fixture(scope="module")', spark="# spark_session", celery="")
    names = ["alone/test_alone.py", "shared/test_shared.py", "celery/test_celery.py", "spark/test_spark.py"]
    assert [unit_of_work(f"tests/{name}::test_one", tmp_path) for name in names] == [
        "tests/alone/test_alone.py::test_one",
        "tests/shared/test_shared.py",
        "tests/celery/",
        "tests/spark/ 0",
    ]


@pytest.mark.slow
def test_a_process_that_is_left_fails_the_run(tmp_path: Path) -> None:
    leave = "import subprocess\ndef test_leave():\n    subprocess.Popen(['sleep', '60']).returncode = 0\n"
    write(tmp_path, leave=leave, clean="def test_clean(): pass\n")
    clean = run("tests/clean", folder=tmp_path)
    assert clean.returncode == 0, clean.stdout
    done = run("tests/leave", folder=tmp_path)
    left = re.search(r"left running by the tests =+\n(\d+) sleep 60 .*test_leave", done.stdout)
    assert left, done.stdout
    os.kill(int(left[1]), signal.SIGKILL)
    assert done.returncode == 1
    assert "1 passed" in done.stdout.splitlines()[-1]


def test_a_process_is_recognised_while_its_program_is_loaded() -> None:
    """`Popen` returns as soon as the kernel has begun with the program, when it shows no environment yet."""
    unknown = 0
    for _ in range(200):
        with subprocess.Popen(["sleep", "60"], env={**os.environ, "MARK": "here"}) as process:
            unknown += b"MARK=here" not in leftovers.environment(Path(f"/proc/{process.pid}")).split(b"\0")
            process.kill()
    assert unknown == 0
