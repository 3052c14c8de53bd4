"""Engines of SQLAlchemy for the databases that an outbox can be in."""

from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from reliablepub.integrations.sqlalchemy import immediate_transactions


def engine_of(database: str) -> Engine:
    """The engine of a file or of a URL."""
    if "://" in database:
        return create_engine(database.replace("postgresql:", "postgresql+psycopg:"))
    engine = create_engine(f"sqlite:///{database}", connect_args={"timeout": 60})
    immediate_transactions(engine)
    return engine


def async_engine_of(database: str, driver: str = "psycopg") -> AsyncEngine:
    """The engine of a file or of a URL, for asyncio."""
    if "://" in database:
        return create_async_engine(database.replace("postgresql:", f"postgresql+{driver}:"))
    engine = create_async_engine(f"sqlite+aiosqlite:///{database}")
    immediate_transactions(engine)
    return engine
