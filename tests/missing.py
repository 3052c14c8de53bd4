"""What a test needs and does not find: the test is skipped; with CI=true it fails."""

import importlib
import os
from typing import Any, NoReturn

import pytest


def miss(reason: str) -> NoReturn:
    """End the test."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def needed(module: str) -> Any:
    """Import a package that is installed for the tests alone."""
    try:
        return importlib.import_module(module)
    except ImportError:
        miss(f"no {module} here: make test installs it")
