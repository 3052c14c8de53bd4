"""Lines, formats, and which records are not fit to be published."""

import gzip
import lzma
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from reliablepub.cli.publish.records import BadRecord, Line, Recipe, Source, read_lines
from reliablepub.cli.publish.template import Template
from reliablepub.cli.signals import Stop


def recipe(
    routing_key: str = "q", message_id: str | None = None, *, is_ndjson: bool | None = None
) -> Recipe:
    templates = {"exchange": Template(""), "routing_key": Template(routing_key)}
    if message_id is not None:
        templates["message_id"] = Template(message_id)
    return Recipe(templates, is_ndjson)


def lines(content: bytes, folder: Path) -> list[tuple[int, bytes]]:
    path = folder / "input"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        return [(line.number, line.body) for line in read_lines(fd, Stop()) if line is not None]
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n\r\n  \t\n", []),
        (b"a\nb\n", [(1, b"a"), (2, b"b")]),
        (b"a\nb", [(1, b"a"), (2, b"b")]),
        (b"a\r\n\r\nb\r\n", [(1, b"a"), (3, b"b")]),
        (b"\n\n a \n", [(3, b" a ")]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", [(1, b"a"), (2, b"\xef\xbb\xbfb")]),
        (b"\xff\x00\n", [(1, b"\xff\x00")]),
    ],
)
def test_lines_are_counted_as_an_editor_counts(
    content: bytes, expected: list[tuple[int, bytes]], tmp_path: Path
) -> None:
    assert lines(content, tmp_path) == expected


@pytest.mark.parametrize(
    ("compress", "command"), [(gzip.compress, "zcat"), (lzma.compress, "xzcat")]
)
def test_compressed_input_is_no_text(
    tmp_path: Path, compress: Callable[[bytes], bytes], command: str
) -> None:
    with pytest.raises(BadRecord, match=f"compressed: pipe it through {command}, and read `-`"):
        lines(compress(b'{"a": 1}\n'), tmp_path)
    assert lines(b"\x1f \x8b\n", tmp_path) == [(1, b"\x1f \x8b")]


@pytest.mark.parametrize("name", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_text_in_another_encoding_is_refused(tmp_path: Path, name: str) -> None:
    """Each of its messages would have NUL bytes, and the end of the line before."""
    family = name[:6].upper()
    words = f"line 1: the input is in {family}: pipe it through `iconv -f {family} -t UTF-8`"
    with pytest.raises(BadRecord, match=words):
        lines("\ufeffone\ntwo\n".encode(name), tmp_path)


def test_lines_longer_than_a_block_are_whole(tmp_path: Path) -> None:
    long = b"x" * 1_000_000
    assert lines(b"a\n" + long + b"\nb\n" + long, tmp_path) == [
        (1, b"a"),
        (2, long),
        (3, b"b"),
        (4, long),
    ]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def test_a_pipe_says_when_it_has_to_wait(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with Stop() as stop:
        found = read_lines(reader, stop)
        os.write(writer, b"one\ntw")
        assert next(found) == Line(1, b"one")
        assert next(found) is None
        os.write(writer, b"o\n")
        assert next(found) == Line(2, b"two")
        os.write(writer, b"three")
        os.close(writer)
        assert list(found) == [Line(3, b"three")]


def test_a_signal_ends_the_wait_for_a_pipe(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with Stop() as stop:
        found = read_lines(reader, stop)
        assert next(found) is None
        os.kill(os.getpid(), 15)
        assert list(found) == []
        assert stop.is_set
    os.close(writer)


def test_a_named_pipe_is_waited_for_until_a_signal(tmp_path: Path) -> None:
    """To open it waits for a writer, unless it is opened without waiting."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    late = threading.Timer(5, lambda: os.close(os.open(path, os.O_RDWR)))
    late.start()
    try:
        with Stop() as stop, Source.open(str(path)) as source:
            assert late.is_alive(), "the pipe was opened only with the writer"
            found = read_lines(source.fd, stop)
            assert next(found) is None
            with path.open("wb") as writer:
                writer.write(b"one\n")
            assert next(found) == Line(1, b"one")
            assert list(found) == []
        with Stop() as stop, Source.open(str(path)) as source:
            found = read_lines(source.fd, stop)
            assert next(found) is None
            os.kill(os.getpid(), 15)
            assert list(found) == []
    finally:
        late.cancel()


@pytest.mark.parametrize(
    ("first", "content_type"),
    [(b'{"a": 1}', "application/json"), (b' {"a": 1}', "application/json"), (b"x", "text/plain")],
)
def test_the_first_record_shows_the_format(first: bytes, content_type: str) -> None:
    made = recipe()
    message = made.message(Line(1, first))
    assert (message.body, message.content_type) == (first, content_type)
    assert made.is_ndjson is (content_type == "application/json")


def test_fields_go_where_the_templates_say() -> None:
    texts = {"exchange": "x-{c}", "routing_key": "{a.b}", "message_id": "id-{i}"}
    texts["ordering_key"] = "key-{i}"
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    made = Recipe({name: Template(text) for name, text in texts.items()}, None, 60.0, tomorrow)
    message = made.message(Line(1, b'{"a": {"b": "k"}, "c": true, "i": 7}'))
    assert message.exchange == "x-true"
    assert message.routing_key == "k"
    assert (message.message_id, message.ordering_key) == ("id-7", "key-7")
    assert (message.expires_in_s, message.not_before) == (60.0, tomorrow)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "is not valid JSON: Expecting property name"),
        (b"[1]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b'{"a": NaN}', "is not valid JSON: NaN is not a JSON number"),
        (b'{"a": "\xff"}', r"is not UTF-8 \(byte 8\)"),
        (
            b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "is not valid JSON: nested too deeply",
        ),
        (b'{"a": ' + b"1" * 10_000 + b"}", "is not valid JSON"),
        (b'{"b": 1}', r"field 'a' is missing \(--routing-key k.\{a\}\)"),
        (b'{"a": "' + b"x" * 300 + b'"}', "routing_key: has 302 bytes"),
        (b'{"a": "\\ud800"}', "routing_key: cannot be encoded"),
    ],
)
def test_a_bad_record_names_line_and_problem(body: bytes, problem: str) -> None:
    with pytest.raises(BadRecord, match=f"line 12: {problem}"):
        recipe("k.{a}", is_ndjson=True).message(Line(12, body))


def test_another_time_does_not_make_another_source(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"x\n")
    now = datetime.now(UTC)
    with Source.open(str(path)) as source:
        plain, later = (replace(recipe(), expires_in_s=s, not_before=now) for s in (None, 1.0))
        keyed = {**recipe().templates, "ordering_key": Template("k")}
        other = replace(recipe(), templates=keyed)
        names = [source.identity(made) for made in (recipe(), plain, later, other)]
    assert names[0] == names[1] == names[2] != names[3]


def test_an_empty_message_id_is_bad() -> None:
    with pytest.raises(BadRecord, match="message_id: is empty"):
        recipe("q", "{a}").message(Line(1, b'{"a": ""}'))


def test_plain_lines_have_no_fields() -> None:
    with pytest.raises(BadRecord, match=r"--routing-key takes field 'a' .* plain lines"):
        recipe("{a}").message(Line(1, b"text"))
