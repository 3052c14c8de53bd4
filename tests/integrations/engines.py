"""Engines of SQLAlchemy for the databases that an outbox can be in."""

from sqlalchemy import Engine, Pool, QueuePool, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from reliablepub.integrations.sqlalchemy import immediate_transactions


def engine_of(database: str, *, poolclass: type[Pool] = QueuePool) -> Engine:
    """The engine of a file or of a URL."""
    if "://" in database:
        url = database.replace("postgresql:", "postgresql+psycopg:")
        return create_engine(url, poolclass=poolclass)
    url, wait = f"sqlite:///{database}", {"timeout": 60}
    engine = create_engine(url, connect_args=wait, poolclass=poolclass)
    immediate_transactions(engine)
    return engine


def async_engine_of(database: str, driver: str = "psycopg") -> AsyncEngine:
    """The engine of a file or of a URL, for asyncio."""
    if "://" in database:
        return create_async_engine(database.replace("postgresql:", f"postgresql+{driver}:"))
    engine = create_async_engine(f"sqlite+aiosqlite:///{database}")
    immediate_transactions(engine)
    return engine
