"""The site in a real browser: navigation, search, copying code, light and dark, a phone.

`make test-site` installs Debian's Chromium if there is no browser, and runs it. The browser needs
no driver: a page of the site acts as a reader would (`seen.js`), and posts what it saw.
"""

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.docs.documents import KINDS, ROOT

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("seen.js")
_WAIT_S = 400


class _Site(SimpleHTTPRequestHandler):
    """Serves the site and the page that looks at it; receives what was seen."""

    def __init__(self, seen: queue.Queue[Any], *arguments: Any, **options: Any) -> None:
        self._seen = seen
        super().__init__(*arguments, **options)

    def do_POST(self) -> None:
        self._seen.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def served(site: Path, seen: queue.Queue[Any]) -> Iterator[str]:
    """The address of the site, on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Site, seen, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_what_a_reader_does_works_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None, "make test-site installs one"
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    pages = [f"/{page.parent.relative_to(site)}/" for page in sorted(site.glob("*/index.html"))]
    script = SCRIPT.read_text().replace("__PAGES__", json.dumps(["/", *pages]))
    (site / "look.html").write_text(f"<!doctype html><body><script>{script}</script>")
    seen: queue.Queue[Any] = queue.Queue()
    with served(site, seen) as url:
        started = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        ]
        process = subprocess.Popen(
            [*started, f"--user-data-dir={tmp_path / 'profile'}", f"{url}/look.html"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            found = seen.get(timeout=_WAIT_S)
        finally:
            process.terminate()
            process.wait(30)
    assert "error" not in found, found["error"]
    assert found["kinds"] == KINDS
    assert found["copyable"]
    assert [line.split()[0] for line in found["copied"]] == ["git", "python3", "reliablepub"]
    assert any("ordering" in path or "guide" in path for path in found["found"]), found["found"]
    assert len(set(found["schemes"])) == 2
    assert found["wide"] == [], "pages that scroll sideways on a phone"
    assert found["broken"] == [], "pictures that cannot be drawn"
    assert found["foreign"] == [], "nothing is loaded from elsewhere"
    assert found["menu"]
