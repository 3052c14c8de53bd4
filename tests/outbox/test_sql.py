"""How a script is cut into statements, and how these get their names."""

import pytest

from reliablepub.outbox.queries import named
from reliablepub.outbox.sqlite.sql import statements

TRIGGER = "CREATE TRIGGER t AFTER INSERT ON a BEGIN\n    DELETE FROM b;\n\n    -- within\nEND;"


def test_a_script_is_cut_where_its_statements_end() -> None:
    text = f"-- about it\n\n   \nSELECT\n    1;\n-- the next\n{TRIGGER}\n\nSELECT 2;\n-- the end\n"
    assert list(statements(text)) == ["SELECT\n    1;", TRIGGER, "SELECT 2;"]
    assert list(statements("")) == []


def test_a_script_that_ends_within_a_statement_is_refused() -> None:
    cut = statements("SELECT 1;\nSELECT 2\nFROM a")
    assert next(cut) == "SELECT 1;"
    with pytest.raises(ValueError, match=r"^the script ends within a statement: 'SELECT 2'$"):
        next(cut)


def test_statements_are_known_by_the_names_above_them() -> None:
    text = "-- about all\n\n-- name: one\n-- about it\nSELECT 1;\n\n-- name: two\nSELECT\n    2;\n"
    assert named(text) == {"one": "SELECT 1", "two": "SELECT\n    2"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-- name: a\nSELECT 1;\n-- name: a\nSELECT 2;", r"^two statements are named a$"),
        ("-- name: a\nSELECT 1;\nSELECT 2;", r"^below the name a is not one whole statement$"),
        ("-- name: a\n-- name: b\nSELECT 1;", r"^below the name a is not one whole statement$"),
        ("-- name: a\nSELECT 1;\n-- name: b\nSELECT 2", r"^below the name b is not one whole"),
    ],
)
def test_a_name_belongs_to_one_statement(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        named(text)
