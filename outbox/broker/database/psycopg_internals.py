"""The names of psycopg that its documentation does not describe. All other modules import them from here.

They were read in psycopg 3.2.2 to 3.3.9. tests/broker/database/test_psycopg_internals.py has a test for each, which
fails if a new version changes it. Two more are used where they are: `BrokerConnection` overrides `Connection.wait`, and
the sender holds `Connection.lock`.
"""

from __future__ import annotations

from typing import Final

from psycopg import Connection
from psycopg.abc import PQGen, PQGenConn
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.generators import connect as connect_generator
from psycopg.generators import execute as execute_generator
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import READY_R, READY_RW, READY_W, WAIT_W, Ready, Wait

__all__ = [
    "READY_R",
    "READY_RW",
    "READY_W",
    "WAIT_W",
    "PGconn",
    "PGresult",
    "PQGen",
    "PQGenConn",
    "Ready",
    "Transformer",
    "Wait",
    "begin_command",
    "connect_generator",
    "error_from_result",
    "execute_generator",
]

# Returns the BEGIN that psycopg would send now, with the isolation level and the like of the connection.
begin_command: Final = Connection._get_tx_start_command
