"""docs/llms.txt, an index for language models (llmstxt.org): every page, by title and kind."""

import re

from tests.docs.documents import KINDS, ROOT

INDEX = ROOT / "docs" / "llms.txt"


def test_it_has_the_parts_that_the_format_asks_for() -> None:
    """A title, a summary as a quotation, then lists of links under headings."""
    lines = INDEX.read_text().splitlines()
    assert lines[0] == "# reliablepub"
    assert lines[2].startswith("> ")
    assert [line[3:] for line in lines if line.startswith("## ")] == KINDS


def test_it_lists_every_page_in_the_order_of_the_site_under_its_title() -> None:
    listed = re.findall(r"^- \[(.+)\]\(([\w-]+\.md)\): \S", INDEX.read_text(), re.MULTILINE)
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = [page for page in re.findall(r"- ([\w-]+\.md)", nav) if (ROOT / "docs" / page).exists()]
    titles = [(ROOT / "docs" / page).read_text().splitlines()[0][2:] for page in pages]
    assert listed == list(zip(titles, pages, strict=True))
