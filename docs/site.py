"""What the site needs beyond the pages in this folder: the README as its start, and the examples.

Called by mkdocs (``hooks`` in mkdocs.yml). Must never know: what a page says.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the README as the first page, and the examples as they are."""
    # Seen from the site's root, everything in docs/ is one floor up.
    start = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=start))
    for example in sorted((ROOT / "examples").rglob("*.py")):
        name = example.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(example)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to the examples lead out of this folder on a forge, and stay inside on the site."""
    return markdown.replace("](../examples/", "](examples/")
