"""Findings in a list, the same for every command that looks for problems, and how it ends.

Knows: how they are printed, and which exit code they come to. Must never know: what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from reliablepub.cli.diagnosis import Finding, Level
from reliablepub.cli.exits import Exit
from reliablepub.cli.output import Form, print_rows


def print_findings(found: Sequence[Finding], form: Form) -> None:
    """All of them, also what is fine."""
    columns = {
        "": lambda row: {"ok": "ok", "warning": "!", "problem": "!!"}[row["level"]],
        "about": lambda row: row["about"],
        "check": lambda row: row["check"],
        "found": lambda row: row["found"],
        "what to do": lambda row: row["remedy"],
    }
    print_rows([asdict(finding) for finding in found], form, columns, nothing="")


def exit_of(found: Sequence[Finding]) -> Exit:
    """A problem of the outbox goes before one of the broker; warnings are none."""
    problems = {finding.about for finding in found if finding.level is Level.PROBLEM}
    if "outbox" in problems:
        return Exit.OUTBOX
    return Exit.BAD_INPUT if problems else Exit.CONFIRMED
