"""The list of findings of ``doctor`` and ``outbox check``, and the exit code for it.

Knows: how findings are printed, and which exit code they give. Must never know: what a finding
means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from reliablepub.cli.doctor.diagnosis import Finding, Level
from reliablepub.cli.exits import Exit
from reliablepub.cli.output import Form, print_rows


def print_findings(found: Sequence[Finding], form: Form) -> None:
    """Print all findings, including those of level ``ok``."""
    columns = {
        "": lambda row: {"ok": "ok", "warning": "!", "problem": "!!"}[row["level"]],
        "about": lambda row: row["about"],
        "check": lambda row: row["check"],
        "found": lambda row: row["found"],
    }
    print_rows(
        [asdict(finding) for finding in found],
        form,
        columns,
        nothing="",
        below=lambda row: f"what to do: {row['remedy']}" if row["remedy"] else "",
    )


def exit_of(found: Sequence[Finding]) -> Exit:
    """The exit code: a problem of the outbox outranks one of the broker; warnings do not count."""
    problems = {finding.about for finding in found if finding.level is Level.PROBLEM}
    if "outbox" in problems:
        return Exit.OUTBOX
    return Exit.BAD_INPUT if problems else Exit.CONFIRMED
