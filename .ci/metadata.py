"""What a release shows on PyPI: links and a README whose links and pictures lead to the repository.

hatchling runs this when it builds. The one variable is ``repository`` in pyproject.toml. While it
is empty, the package has no links, and its README is as it is here.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"(!\[[^\]]*\])\((?!https:)([^)]+)\)")
LINK = re.compile(r"(?<!!)(\[[^\]]*\])\((?!https:|#)([^)]+)\)")


class Links(MetadataHookInterface):
    """Adds ``readme`` and ``urls`` to the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read the README, and make its links absolute if the repository is known."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        home = self.config["repository"]
        if home:
            tag = f"v{metadata['version']}"
            pages = f"{home}/blob/{tag}"
            metadata["urls"] = {
                "Homepage": home,
                "Documentation": f"{pages}/docs",
                "Changelog": f"{pages}/docs/changelog.md",
                "Issues": f"{home}/issues",
                "Security": f"{pages}/SECURITY.md",
                "Source": home,
            }
            text = PICTURE.sub(rf"\1({home}/raw/{tag}/\2)", LINK.sub(rf"\1({pages}/\2)", text))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
