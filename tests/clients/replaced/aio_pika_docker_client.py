"""Replaces the Docker client of aio-pika's tests: their container is a broker that runs already."""

import os
from dataclasses import dataclass


class DockerNotAvailableError(Exception):
    """Never raised."""


class DockerHostInfo:
    """Unused."""


def check_docker_available() -> DockerHostInfo:
    """It is not needed."""
    return DockerHostInfo()


@dataclass
class ContainerInfo:
    """A broker."""

    id: str
    ports: dict[str, int]
    host: str


class DockerClient:
    """Names the broker at `BROKER_PORT`."""

    def __init__(self, docker_host_info: DockerHostInfo | None = None) -> None:
        """Nothing is needed."""

    def run(
        self, image: str, ports: list[str], environment: dict[str, str] | None = None
    ) -> ContainerInfo:
        """What stands for a new container; without TLS."""
        port = int(os.environ["BROKER_PORT"])
        return ContainerInfo("", {"5672/tcp": port, "5671/tcp": port}, "127.0.0.1")

    def kill(self, container_id: str) -> None:
        """It goes on."""

    def remove(self, container_id: str) -> None:
        """It stays."""
