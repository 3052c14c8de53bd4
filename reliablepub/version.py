"""The version of this package. Must never know: anything else."""


def installed_version() -> str | None:
    """The version of reliablepub; None if it runs without being installed."""
    # Loading it takes a tenth of the time in which the command line starts.
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        return version("reliablepub")
    except PackageNotFoundError:
        return None
