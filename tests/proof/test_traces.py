"""What a storm of real processes did is a run of the models, and a falsified history is not."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.oracle.storm import Plan
from tests.proof import models, traces
from tests.proof.recorded_points import POINTS
from tests.proof.recording import RecordedServer, record
from tests.proof.traces import Trace

pytestmark = pytest.mark.skipif(
    not models.is_installed() and "CI" not in os.environ, reason="Spin is not installed: apt-get install spin"
)

KEPT = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("model", traces.OF_MODEL)
def test_kept_traces_are_runs_of_the_model(model: str) -> None:
    kept = traces.kept(KEPT / f"{model}.txt")
    assert kept
    assert traces.replay(model, kept).refused == []


# The last step of each is the lie: without it, the trace is a run.
FALSIFIED = {
    "ledger": {
        "COMMIT after ROLLBACK": "HALF 0 0, TOMBSTONE 0 0, DECIDED 1 0, DECIDED 1 1; ROW 0 0",
        "the transaction commits after ROLLBACK": "HALF 0 0, TOMBSTONE 0 0, DECIDED 1 0, COMMITTED 0 0; ROW 0 0",
        "decided twice": "HALF 0 0, COMMITTED 0 0, DECIDED 1 1, DECIDED 1 1; ROW 0 0",
        "COMMIT before COMMIT": "HALF 0 0, DECIDED 1 1; ROW 0 0",
        "a guessed ROLLBACK": "HALF 0 0, DECIDED 1 0; ROW 0 0",
        "COMMIT that nobody reported": "HALF 0 0, COMMITTED 0 0, DECIDED 0 1; ROW 0 0",
        "a transaction commits without its half message": "COMMITTED 0 0; ROW 0 0",
        "a tombstone beside the row": "HALF 0 0, COMMITTED 0 0, TOMBSTONE 0 0; ROW 0 0",
        "an incident": "HALF 0 0, COMMITTED 0 0, DECIDED 1 1, CONTRADICTED 0 0; ROW 0 0",
    },
    "lease": {
        "an effect twice": "ACQUIRED 0 0, EFFECT 0 0, ACQUIRED 1 0, EFFECT 1 0",
        "an effect twice in one epoch": "ACQUIRED 0 0, EFFECT 0 0, EFFECT 0 0",
        "an effect of nobody who owned the queue": "ACQUIRED 0 0, EFFECT 1 0",
        "a former owner begins another message": "ACQUIRED 0 0, ACQUIRED 1 0, EFFECT 0 0, EFFECT 0 1",
        "an older epoch goes on storing": (
            "ACQUIRED 0 0, EFFECT 0 0, EFFECT 0 1, ACQUIRED 1 0, STORED 0 1, STORED 0 2"
        ),
        "an offset passes a message without effect": "ACQUIRED 0 0, EFFECT 0 1, STORED 0 2",
        "an offset goes back": "ACQUIRED 0 0, EFFECT 0 0, EFFECT 0 1, STORED 0 2, STORED 0 1",
        "the inbox row without the effect": "ACQUIRED 0 0, outbox_inbox 0 0",
    },
    "tick": {
        "a tick forgets an earlier transaction": "COMMITTED 0 1, COMMITTED 0 2, TICK 2 3",
        "a tick appends what its snapshot does not show": "COMMITTED 0 1, COMMITTED 0 2, TICK 3 1",
        "a tick appends what is not committed": "COMMITTED 0 2, TICK 3 3",
        "two ticks append the same": "COMMITTED 0 1, TICK 1 1, COMMITTED 0 2, TICK 3 3",
        "a later tick sees less": "COMMITTED 0 1, COMMITTED 0 3, TICK 5 5, TICK 0 1",
    },
    "claim": {
        "a finished message is claimed again": "CLAIMED 0 0, STORED 0 0, FINISHED 0 0, CLAIMED 1 0",
        "a former claim stores a result": "CLAIMED 0 0, CLAIMED 1 0, STORED 0 0",
        "a former claim finishes": "CLAIMED 0 0, STORED 0 0, CLAIMED 1 0, FINISHED 0 0",
        "finished without the step": "CLAIMED 0 0, FINISHED 0 0",
        "a result is stored twice": "CLAIMED 0 0, STORED 0 0, CLAIMED 1 0, STORED 1 0",
        "the inbox row without the effect": "CLAIMED 0 0, STORED 0 0, outbox_inbox 0 0",
    },
}


@pytest.mark.parametrize("model", traces.OF_MODEL)
def test_control_a_falsified_trace_is_refused(model: str) -> None:
    falsified = [Trace.read(name, text) for name, text in FALSIFIED[model].items()]
    honest = [replace(one, database=one.database[:-1]) for one in falsified]
    assert traces.replay(model, honest).refused == []
    refused = traces.replay(model, falsified).refused
    assert [sentence.split(":")[0] for sentence in refused] == list(FALSIFIED[model])


def test_control_a_client_that_reports_what_is_not_so_is_refused() -> None:
    reports = [
        Trace.read("COMMIT", "HALF 0 0, TOMBSTONE 0 0; ROW 0 0, ANSWERED 0 0, REPORTED 0 1"),
        Trace.read("ROLLBACK", "HALF 0 0, COMMITTED 0 0; ROW 0 0, ANSWERED 0 0, REPORTED 0 0"),
    ]
    assert traces.replay("ledger", [replace(one, process=one.process[:-1]) for one in reports]).refused == []
    assert len(traces.replay("ledger", reports).refused) == 2


@pytest.mark.slow
@pytest.mark.parametrize("path", ["atomic", "two-phase"])
def test_a_storm_is_a_run_of_the_models(path: str, server: RecordedServer, tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(2))
    history = record(Plan(seed, path, seconds=40), tmp_path, server)
    visits = Counter(line["point"] for line in history.lines if line["event"] == "step")
    assert all(visits[point] for point in POINTS)
    taken = {model: take(history) for model, take in traces.OF_MODEL.items()}
    assert len(taken["lease"]) >= 100
    # On the atomic path, only the transactions of the second database have two phases.
    assert len(taken["ledger"]) >= (5 if path == "atomic" else 100)
    for model, found in taken.items():
        assert traces.replay(model, found).refused == [], f"storm {seed}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedServer]:
    server = RecordedServer(tmp_path_factory.mktemp("recorded") / "server")
    try:
        yield server
    finally:
        server.stop()
