"""The files of deploy/ are valid where a tool can say so offline, and their command lines are the real ones."""

from __future__ import annotations

import functools
import http.client
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from celery.bin.celery import celery as celery_command

from outbox.contrib.django.settings.conf import OutboxSettings
from tests.celery.project import write_page
from tests.django import configured
from tests.documents import DOCS, ROOT, Command, blocks
from tests.runbooks import systemctl
from tests.runbooks.machine import Machine
from tests.runbooks.test_runbooks import new_machine
from tests.support import eventually
from tests.test_operator_documents import parsed

__all__ = ["new_machine"]

DEPLOY = ROOT / "deploy"
PAGE = DOCS / "operations" / "deploy.md"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DRAIN_SECONDS = float(next(str(one.default) for one in fields(OutboxSettings) if one.name == "drain_seconds"))
# These answer to a question of the shop's own project, not of outbox.
OF_THE_PROJECT = {"makemigrations", "test"}


def documents(file: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(file.read_text()) if one]


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return found


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(manifest, container) of the manifests with pods."""
    for file in MANIFESTS:
        for manifest in documents(file):
            if "template" in manifest.get("spec", {}):
                inside = pod(manifest)
                yield from ((manifest, one) for one in [*inside.get("initContainers", []), *inside["containers"]])


def lines(words: list[str] | str) -> list[list[str]]:
    """The command lines of a list of words, or of a shell's line."""
    if isinstance(words, str):
        return [shlex.split(one) for one in words.split("&&")]
    return lines(words[2]) if words[:1] == ["sh"] else [words]


def command_lines() -> dict[str, list[list[str]]]:
    """The command lines of each file."""
    found: dict[str, list[list[str]]] = {unit.name: systemctl.commands(unit.stem) for unit in UNITS}
    [compose] = documents(DEPLOY / "compose.yaml")
    services = compose["services"].values()
    given = [one["command"] for one in services if "command" in one]
    tests = [one["healthcheck"]["test"][1:] for one in services if "healthcheck" in one]
    found["compose.yaml"] = [line for words in [*given, *tests] for line in lines(words)]
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    found["Dockerfile"] = [yaml.safe_load(one) for one in re.findall(r"^CMD (.+)$", dockerfile, re.MULTILINE)]
    for manifest, container in containers():
        found.setdefault(manifest["metadata"]["name"], []).append(container["command"])
    [workflow] = documents(DEPLOY / "github" / "ci.yml")
    steps = workflow["jobs"]["tests"]["steps"]
    found["ci.yml"] = [line for step in steps if "run" in step for line in lines(step["run"])]
    return found


def managed(name: str) -> list[list[str]]:
    """What follows `manage.py` in the command lines of a file."""
    return [line[line.index("manage.py") + 1 :] for line in command_lines()[name] if "manage.py" in line]


@pytest.mark.parametrize("name", sorted(command_lines()))
def test_every_command_line_is_accepted(name: str) -> None:
    assert configured.OUTBOX and command_lines()[name]
    for words in managed(name):
        if words[0] not in OF_THE_PROJECT:
            parsed(Command(DEPLOY, tuple(words)))


@pytest.mark.parametrize("name", [unit.name for unit in UNITS if "/bin/celery " in unit.read_text()])
def test_celery_accepts_the_command_lines_of_its_units(name: str, tmp_path: Path) -> None:
    # A project whose worker has the options of outbox.
    write_page(tmp_path)
    url = "postgresql://shop@/shop?host=/run"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DATABASE_URL": url, "OUTBOX_DATABASE_URL": url}

    def code(words: list[str]) -> int:
        command = [sys.executable, "-m", "celery", *words, "--help"]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=False).returncode

    [[_, *words]] = command_lines()[name]
    assert code(words) == 0
    assert code([*words, "--outbux"]) == 2


def test_the_pages_name_every_unit_and_the_file_of_the_pooler() -> None:
    assert [unit.stem for unit in UNITS if f"`{unit.stem}`" not in PAGE.read_text()] == []
    assert "`deploy/pgbouncer.ini`" in (DOCS / "operations" / "connections.md").read_text()


def test_every_file_waits_longer_than_a_worker_drains() -> None:
    [compose] = documents(DEPLOY / "compose.yaml")
    [worker] = [one for one, container in containers() if "outbox_worker" in container["command"]]
    waits = [
        *(float(systemctl.unit(name)["TimeoutStopSec"][0]) for name in ("shop-worker", "shop-celery")),
        float(compose["services"]["worker"]["stop_grace_period"].removesuffix("s")),
        float(pod(worker)["terminationGracePeriodSeconds"]),
    ]
    assert [wait > DRAIN_SECONDS for wait in waits] == [True] * 4


def test_the_autoscaler_asks_the_figure_of_the_dashboard() -> None:
    scaler, adapter = documents(DEPLOY / "kubernetes" / "autoscaling.yaml")
    [rule] = yaml.safe_load(adapter["data"]["rules.yaml"])["externalRules"]
    metric = scaler["spec"]["metrics"][0]["external"]["metric"]
    assert metric["name"] == rule["name"]["as"] == rule["seriesQuery"] == "outbox_lag_messages"
    assert set(metric["selector"]["matchLabels"]) == {"broker", "group"}
    dashboard = json.loads((ROOT / "outbox" / "contrib" / "prometheus" / "dashboard.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert re.sub(r"\{.*\}", "{}", rule["metricsQuery"]) in [re.sub(r"\{.*\}", "{}", one) for one in shown]
    assert scaler["spec"]["scaleTargetRef"]["name"] in {manifest["metadata"]["name"] for manifest, _ in containers()}
    # Prometheus adds the label `broker`, and finds the named port of the worker's pods.
    [job] = yaml.safe_load(adapter["data"]["scrape.yaml"])
    [kept, added] = job["relabel_configs"]
    assert (added["target_label"], added["replacement"]) == ("broker", metric["selector"]["matchLabels"]["broker"])
    manifest, worker = worker_container()
    app, port = manifest["spec"]["template"]["metadata"]["labels"]["app"], worker["ports"][0]["name"]
    assert kept["regex"] == f"{app};{port}"


def test_only_the_readiness_of_a_worker_needs_the_broker() -> None:
    _, worker = worker_container()
    paths = {kind: worker[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/live", "liveness": "/live", "readiness": "/ready"}


def test_each_kind_of_process_has_a_login_of_its_own() -> None:
    secrets: dict[str, set[str]] = {}
    for manifest, container in containers():
        names = [one["secretRef"]["name"] for one in container["envFrom"]]
        secrets.setdefault(manifest["metadata"]["name"], set()).update(names)
    of_all = {"shop-metrics"}
    logins = {name: names - of_all for name, names in secrets.items()}
    assert logins == {name: {name} for name in ("shop-migrate", "shop-web", "shop-worker")}
    assert of_all <= secrets["shop-worker"]


def test_every_release_checks_the_settings_after_the_tables() -> None:
    for name in ("shop-migrate.service", "shop-migrate", "compose.yaml"):
        release = [words[0] for words in managed(name) if words[0] in ("migrate", "check")]
        assert release == ["migrate", "migrate", "check"], name


def test_a_release_on_kubernetes_gives_each_container_the_new_image(tmp_path: Path) -> None:
    [release] = [code for code in blocks(PAGE, "") if "kubectl delete job" in code]
    [tagging] = [line for line in release.splitlines() if line.startswith("sed ")]
    shutil.copytree(DEPLOY / "kubernetes", tmp_path, dirs_exist_ok=True)
    subprocess.run(["bash", "-euc", tagging], cwd=tmp_path, env={**os.environ, "TAG": "2026.11"}, check=True)
    images = re.findall(r"image: (.+)", "".join(file.read_text() for file in tmp_path.glob("*.yaml")))
    assert images == ["registry.example.com/shop:2026.11"] * len(list(containers()))
    # A second release finds the job of the first one.
    kubectl = [shlex.split(line)[1:] for line in release.splitlines() if line.startswith("kubectl ")]
    assert kubectl[:2] == [
        ["delete", "job", "shop-migrate", "--ignore-not-found"],
        ["apply", "--filename", "migrate.yaml"],
    ]


def test_all_workers_read_one_list_of_erasures(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, worker = worker_container()
    [place] = [one["value"] for one in worker["env"] if one["name"] == "ERASURE_LIST"]
    [mount] = [one for one in worker["volumeMounts"] if place.startswith(one["mountPath"] + "/")]
    [volume] = [one for one in pod(manifest)["volumes"] if one["name"] == mount["name"]]
    [claim] = documents(DEPLOY / "kubernetes" / "erasures.yaml")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    [compose] = documents(DEPLOY / "compose.yaml")
    container = compose["services"]["worker"]
    assert container["environment"]["ERASURE_LIST"] == place
    assert container["volumes"] == [f"erasures:{mount['mountPath']}"] and "erasures" in compose["volumes"]
    assert "ERASURE_LIST" not in settings_of(monkeypatch)
    settings = settings_of(monkeypatch, ERASURE_LIST=place, OUTBOX_ERASURE_SECRET="secret")
    assert (settings["ERASURE_LIST"], settings["ERASURE_SECRET"]) == (place, "secret")


def test_no_variable_is_an_option_of_celery() -> None:
    # Celery's command takes the address of its broker from BROKER_URL, before the project's settings.
    options = variables_of(celery_command)
    files = [one for one in DEPLOY.rglob("*") if one.is_file() and one.suffix != ".pyc"]
    texts = [file.read_text() for file in (*files, PAGE, DOCS / "operations" / "restore.md")]
    named = {name for text in texts for name in re.findall(r"\b[A-Z_]+\b", text)}
    assert "BROKER_URL" in options and "APPLICATION_URL" in named
    assert options & named == set()


def variables_of(command: click.Command) -> set[str]:
    """The environment variables that set an option of a command or of one of its commands."""
    found = {str(option.envvar) for option in command.params if option.envvar}
    return found.union(*(variables_of(one) for one in getattr(command, "commands", {}).values()))


def worker_container() -> tuple[dict[str, Any], dict[str, Any]]:
    [found] = [(one, container) for one, container in containers() if "outbox_worker" in container["command"]]
    return found


def settings_of(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, Any]:
    """OUTBOX of deploy/settings.py with these environment variables."""
    for name in ("APPLICATION_URL", "OUTBOX_BROKER_URL"):
        monkeypatch.setenv(name, "postgresql://shop@db/shop")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found: dict[str, Any] = runpy.run_path(str(DEPLOY / "settings.py"))["OUTBOX"]
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        # It looks for the programs and the user.
        text = re.sub(r"/srv/shop/\.venv/bin/\w+", sys.executable, unit.read_text())
        text = text.replace("User=shop", "User=daemon").replace("=/srv/shop", f"={tmp_path}")
        (tmp_path / unit.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / unit.name) for unit in UNITS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if any(unit.name in line for unit in UNITS)]
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_kubernetes_accepts_the_manifests(file: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    newest = validator.latest_version()
    for manifest in documents(file):
        validator.validate(manifest, newest, strict=True)
    wrong = dict.fromkeys(("replicas", "parallelism", "maxReplicas", "accessModes"), "wrong")
    with pytest.raises(validator.ValidationError):
        validator.validate({**documents(file)[0], "spec": wrong}, newest)


@pytest.mark.parametrize(
    ("file", "schema"), [("compose.yaml", "compose-spec"), ("github/ci.yml", "github-workflows")], ids=["compose", "ci"]
)
def test_the_specifications_accept_the_files(file: str, schema: str, tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")

    def check(path: Path) -> int:
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(path)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert check(DEPLOY / file) == 0
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((DEPLOY / file).read_text().replace("image: postgres", "imagine: postgres"))
    assert check(wrong) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_of_the_files_run(new_machine: Callable[..., Machine]) -> None:
    """Each distinct `manage.py` line of all files, on empty databases, and a worker that is probed and stopped."""
    machine = new_machine(tables=False)
    every = [tuple(words) for name in command_lines() for words in managed(name)]
    once = list(dict.fromkeys(every))
    workers = [words for words in once if words[0] == "outbox_worker"]
    probes = [words for words in once if words[0] == "outbox_status"]
    before = [
        words for words in once if words not in workers and words not in probes and words[0] not in OF_THE_PROJECT
    ]
    assert workers == [("outbox_worker",)]
    machine.bash("manage.py migrate --run-syncdb shop")
    # The order of the workflow: the tables, then what looks at them.
    for words in sorted(before, key=lambda words: (words[0] != "migrate", len(words) < 2, words[0])):
        # The doctor warns that no worker runs, as the workflow expects.
        machine.bash(shlex.join(["manage.py", *words]), codes=(0, 1) if words[0] == "outbox_doctor" else (0,))
    # A release that goes back: the tables have a migration that the code does not have.
    newer = "INSERT INTO django_migrations (app, name, applied) VALUES ('outbox', '9999_newer', now()) RETURNING name"
    machine.ask("APPLICATION_URL", newer)
    machine.bash("manage.py migrate --database=broker\nmanage.py migrate")
    machine.bash("systemctl start shop-worker")
    port = int(machine.variables["TEST_HEALTH_PORT"])
    [probed] = [container for manifest, container in containers() if "outbox_worker" in container["command"]]
    paths = {probed[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"/live", "/ready"}
    for path in sorted(paths):
        eventually(functools.partial(answers, port, path), within_seconds=60, what=machine.logs)
    machine.variables["HEALTH_DIRECTORY"] = str(machine.folder / "run" / "shop-worker")
    for words in probes:
        machine.bash(shlex.join(["manage.py", *words]))
    pid = int((machine.folder / "shop-worker.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: not systemctl.is_alive(pid), within_seconds=DRAIN_SECONDS + 5)


def answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
