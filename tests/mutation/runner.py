"""Tests that are collected once, and run for each mutant in a fork of that moment.

mutmut starts pytest anew for every mutant: it reads the configuration, imports the test modules and
collects, which takes far longer than the test that notices the mutant.
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from _pytest.config import _prepareconfig
from mutmut.__main__ import collect_source_file_mutation_data
from mutmut.configuration import config
from mutmut.runners.harness import PytestRunner
from mutmut.utils.file_utils import change_cwd
from mutmut.workers import isolation

# What a test has written goes when it has passed: each outbox reserves some megabytes.
KEEPS_LITTLE = "--override-ini=tmp_path_retention_policy=failed"
# Not the options of the project, of which `-rs` is the terminal's.
OPTIONS = [
    *("--override-ini=addopts=", "--import-mode=importlib", "-mnot soak and not bench"),
    *("--rootdir=.", "--capture=no", "-pno:randomly", "-pno:terminal", KEEPS_LITTLE),
]


class _Runner(PytestRunner):
    def __init__(self) -> None:
        super().__init__()
        self._items: dict[str, pytest.Item] = {}

    def run_tests(self, *, mutant_name: str | None, tests: Iterable[str]) -> int:
        if mutant_name is None:  # not in a fork: the clean run, the one that must fail
            return super().run_tests(mutant_name=mutant_name, tests=tests)
        with change_cwd("mutants"), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
            items = [self._items[name] for name in tests]
            for item, following in pairwise((*items, None)):
                assert item is not None
                item.config._tmp_path_factory._basetemp = Path(own)  # type: ignore[attr-defined]
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                if item.session.testsfailed:
                    return 1
        return 0

    def execute_pytest(self, params: list[str], **kwargs: Any) -> int:
        return super().execute_pytest([*params, KEEPS_LITTLE], **kwargs)

    def collect(self) -> None:
        """Begin a session that never ends: its forks do."""
        with change_cwd("mutants"):
            selection = config().pytest_add_cli_args_test_selection
            prepared = _prepareconfig([*OPTIONS, *config().pytest_add_cli_args, *selection])
            prepared._do_configure()
            session = pytest.Session.from_config(prepared)
            prepared.hook.pytest_sessionstart(session=session)
            prepared.hook.pytest_collection(session=session)
        self._items = {item.nodeid: item for item in session.items}


class _ForkRunner(isolation.ForkRunner):
    _are_clean = False

    def startup(self) -> None:
        assert isinstance(self.test_runner, _Runner)
        self.test_runner.collect()
        super().startup()

    def collect_stats(self, tests: Iterable[str] | None) -> int:
        self._are_clean = not tests
        return super().collect_stats(tests)

    def run_clean_tests(self, tests: Iterable[str]) -> int:
        """Once is enough: to learn which tests run what, all were run."""
        return 0 if self._are_clean else super().run_clean_tests(tests)


def _undecided(**names: Any) -> tuple[list[Any], Any]:
    """Of modules that are named, too, only what is not decided: a run that was stopped goes on."""
    mutants, data = collect_source_file_mutation_data(**names)
    return [mutant for mutant in mutants if mutant[2] is None], data


@contextmanager
def with_collected_tests() -> Iterator[None]:
    """Have mutmut run its mutants so."""
    with (
        patch.object(isolation, "PytestRunner", _Runner),
        patch.object(isolation, "ForkRunner", _ForkRunner),
        patch("mutmut.__main__.collect_source_file_mutation_data", _undecided),
    ):
        yield
