"""The version of this package. Must never know: anything else."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str | None:
    """The version of reliablepub; None if it runs without being installed."""
    try:
        return version("reliablepub")
    except PackageNotFoundError:
        return None
