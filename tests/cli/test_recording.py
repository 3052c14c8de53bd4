"""The recording of docs/watch.svg: every frame is in it, for a second each."""

from xml.etree import ElementTree as ET

from rich.text import Text

from tests.cli.recording import PICTURE, lines, picture

SVG = "{http://www.w3.org/2000/svg}"


def test_each_frame_is_shown_for_a_second_and_text_is_escaped() -> None:
    drawn = picture([lines(Text("a < b", style="bold red")), lines(Text("c\nd"))])
    first, second = ET.fromstring(drawn).iter(f"{SVG}g")
    assert [first.get("style"), second.get("style")] == ["animation-delay:0s", "animation-delay:1s"]
    assert "".join(first.itertext()).strip() == "a < b"
    assert [line.text for line in second.iter(f"{SVG}text")] == ["c", "d"]
    assert "animation:f 2s" in drawn


def test_the_picture_of_the_documents_loads_nothing() -> None:
    text = PICTURE.read_text()
    frames = list(ET.fromstring(text).iter(f"{SVG}g"))
    assert len(frames) > 30
    assert "outbox explain" in "".join(frames[-1].itertext())
    assert text.count("http") == 1  # the name of SVG itself
