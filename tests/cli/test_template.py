"""Braces, fields, and what may stand in a routing key."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliablepub.cli.publish.template import Template, TemplateError


@pytest.mark.parametrize(
    ("text", "record", "expected"),
    [
        ("fixed", {}, "fixed"),
        ("", {}, ""),
        ("flight.{carrier}.{dest}", {"carrier": "AA", "dest": "JFK"}, "flight.AA.JFK"),
        ("{a.b.c}", {"a": {"b": {"c": 7}}}, "7"),
        ("{{{a}}}", {"a": "x"}, "{x}"),
        ("{{a}}", {}, "{a}"),
        ("{a}", {"a": True}, "true"),
        ("{a}", {"a": False}, "false"),
        ("{a}", {"a": 1.5}, "1.5"),
        ("{a}", {"a": -3}, "-3"),
        ("{a}", {"a": ""}, ""),
        ("{a b-ü}", {"a b-ü": "x"}, "x"),
    ],
)
def test_fields_are_filled_in(text: str, record: dict[str, Any], expected: str) -> None:
    assert Template(text).fill(record) == expected


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({}, "field 'a' is missing"),
        ({"a": {}}, "field 'a.b' is missing"),
        ({"a": None}, "field 'a' is not an object"),
        ({"a": "x"}, "field 'a' is not an object"),
        ({"a": {"b": None}}, "field 'a.b' is null"),
        ({"a": {"b": [1]}}, "field 'a.b' is a list"),
        ({"a": {"b": {"c": 1}}}, "field 'a.b' is an object"),
    ],
)
def test_what_cannot_be_filled_in_names_the_field(record: dict[str, Any], problem: str) -> None:
    with pytest.raises(TemplateError, match=problem):
        Template("x.{a.b}").fill(record)


@pytest.mark.parametrize(
    "text", ["{", "}", "a{b", "a}b", "{{a}", "{a}}", "{}", "{a.}", "{.a}", "{a{b}}"]
)
def test_a_template_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(TemplateError):
        Template(text)


@given(st.text())
def test_any_text_can_be_written_as_a_template(text: str) -> None:
    escaped = text.replace("{", "{{").replace("}", "}}")
    template = Template(escaped)
    assert template.fill({}) == text
    assert template.fields == ()


def test_a_number_beyond_a_float_is_refused() -> None:
    with pytest.raises(TemplateError, match="field 'n' is too large a number"):
        Template("{n}").fill(json.loads('{"n": -1e400}'))
