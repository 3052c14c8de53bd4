"""The wheel and the source distribution, built once."""

import email
import zipfile
from dataclasses import dataclass
from email.message import Message as Headers
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path

    @property
    def in_wheel(self) -> dict[str, bytes]:
        with zipfile.ZipFile(self.wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    @property
    def metadata(self) -> Headers:
        (text,) = (content for name, content in self.in_wheel.items() if name.endswith("/METADATA"))
        return email.message_from_bytes(text)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Built(Path(wheel), Path(sdist))
