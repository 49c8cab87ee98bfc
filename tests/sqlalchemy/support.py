"""A shop without Django: a table beside the broker's, and sessions of each driver on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

Result = TypeVar("Result")

# The driver, and whether its sessions are async.
DRIVERS: Final = {"psycopg": False, "psycopg async": True, "asyncpg": True}


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "shop_order"
    number: Mapped[str] = mapped_column(primary_key=True)


def url_of(conninfo: str, driver: str = "psycopg") -> str:
    """The URL of SQLAlchemy for a database of the tests."""
    given = {name: str(value) for name, value in conninfo_to_dict(conninfo).items()}
    url = URL.create(
        f"postgresql+{driver.partition(' ')[0]}",
        given.pop("user"),
        given.pop("password", None),
        database=given.pop("dbname"),
        query=given,
    )
    return url.render_as_string(hide_password=False)


def in_session(
    conninfo: str, driver: str, work: Callable[[Session], Result], prepare: Callable[[Engine], None] | None = None
) -> Result:
    """What `work` returns, called with a session of the driver; `prepare` gets its engine before."""
    prepare = prepare or (lambda engine: None)
    if not DRIVERS[driver]:
        engine = create_engine(url_of(conninfo, driver))
        try:
            prepare(engine)
            with Session(engine) as session:
                return work(session)
        finally:
            engine.dispose()

    async def run() -> Result:
        engine = create_async_engine(url_of(conninfo, driver))
        try:
            prepare(engine.sync_engine)
            async with AsyncSession(engine) as session:
                return await session.run_sync(work)
        finally:
            await engine.dispose()

    return asyncio.run(run())


def stored(connection: psycopg.Connection[Any]) -> tuple[list[str], list[str]]:
    """The numbers of the committed rows, and those in the bodies of the messages, both in order."""
    rows = [number for (number,) in connection.execute("SELECT number FROM shop_order")]
    bodies = connection.execute("SELECT body FROM outbox.commit_log JOIN outbox.op_log USING (transaction_id)")
    return sorted(rows), sorted(json.loads(body)["number"] for (body,) in bodies)
