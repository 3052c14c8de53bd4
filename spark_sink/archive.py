"""``python -m spark_sink.archive reliablepub.zip``: the sink for a cluster that lacks it.

Knows: installed packages and their files. Must never know: Spark's API.

The archive is for ``--py-files`` and ``addArtifacts``. It holds this package, the parts of
`reliablepub` that publish and read outboxes, and the pure Python packages that these import.
PySpark and pyarrow must be installed on the cluster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Final
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

_PACKAGES: Final = ("pika", "reliablepub", "spark_sink", "tenacity")
_LEFT_OUT: Final = ("reliablepub/cli", "reliablepub/demo", "reliablepub/testing")
"""The command line, demo and fake broker: a cluster runs none, and they need most dependencies."""
_MODULES: Final = ("pyspark_rabbitmq", "pyspark_reliablepub_outbox")
"""Top-level modules by which Spark finds data sources in an unpacked archive on its path."""


def build(archive: Path) -> int:
    """Write the archive; identical files give identical bytes.

    Args:
        archive: path of the zip; an existing file is overwritten.

    Returns:
        its size in bytes.
    """
    with ZipFile(archive, "w", ZIP_DEFLATED, compresslevel=9) as zipped:
        for name, source in sorted(_files()):
            zipped.writestr(_info(name), source.read_bytes())
    return archive.stat().st_size


def _files() -> Iterator[tuple[str, Path]]:
    for module in _MODULES:
        found = find_spec(module)
        assert found is not None, f"{module} is installed with this one"
        assert found.origin is not None, f"{module} is a file"
        yield f"{module}.py", Path(found.origin)
    for package in _PACKAGES:
        spec = find_spec(package)
        assert spec is not None, f"{package} is installed with this one"
        assert spec.submodule_search_locations, f"{package} is a package"
        folder = Path(spec.submodule_search_locations[0])
        for path in folder.rglob("*"):
            name = PurePosixPath(package, path.relative_to(folder).as_posix())
            if (
                path.is_file()
                and "__pycache__" not in name.parts
                and not str(name).startswith(_LEFT_OUT)
                and name.stem not in _MODULES  # beside this module in a checkout alone
            ):
                yield str(name), path
        yield from _licenses(package)


def _licenses(package: str) -> Iterator[tuple[str, Path]]:
    """Metadata and licenses, which must accompany a redistributed package."""
    if package == "spark_sink":
        return  # in one distribution with reliablepub
    for file in distribution(package).files or ():
        if ".dist-info" in file.parts[0] and (
            file.name == "METADATA" or "LICENSE" in file.name.upper()
        ):
            yield file.as_posix(), Path(str(file.locate()))


def _info(name: str) -> ZipInfo:
    info = ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.compress_type = ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    return info


def main() -> None:
    """Write the archive to the path given on the command line."""
    parser = argparse.ArgumentParser(prog="python -m spark_sink.archive", description=__doc__)
    parser.add_argument("archive", type=Path, help="path of the zip to write")
    path = parser.parse_args().archive
    sys.stdout.write(f"{path}: {build(path) / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
