"""The wheel and the source distribution, built once."""

import email
import zipfile
from dataclasses import dataclass
from email.message import Message as Headers
from pathlib import Path

import pika
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


def arrives(url: str) -> None:
    """Check that a plain client can publish to a broker, and get the message back."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("q")
    channel.basic_publish("", "q", b"x", mandatory=True)
    _, _, body = channel.basic_get("q", auto_ack=True)
    assert body == b"x"
    connection.close()
