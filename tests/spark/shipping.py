"""A Python without our package, and our package as people ship it to clusters.

Knows: installed distributions and their files. Must never know: Spark's API.
"""

import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent


def bare_python(folder: Path, *more: str) -> Path:
    """An interpreter with PySpark, these packages, what they need, and nothing else."""
    venv.create(folder, symlinks=True, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    for found in _needed("pyspark[connect]", "pyarrow", *more):
        for name in _top_level(found):
            if not (packages / name).exists():
                (packages / name).symlink_to(str(found.locate_file(name)))
    return folder / "bin" / "python"


def wheel_python(folder: Path) -> Path:
    """An interpreter in which the wheel of this checkout is installed, with the extra `spark`."""
    python = bare_python(folder, "pamqp", "pika", "sqlite-utils", "tenacity")
    built = folder / "dist"
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(built), versions=["standard"])
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    return python


def shipped(folder: Path) -> tuple[Path, Path]:
    """Our package as people ship it (docs/spark.md), from a wheel: as a zip, and unpacked."""
    package, unpacked = folder / "reliablepub.zip", folder / "package"
    python = wheel_python(folder / "wheel")
    command = [str(python), "-m", "spark_sink.archive", str(package)]
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    shutil.unpack_archive(package, unpacked)
    return package, unpacked


def _needed(*names: str) -> Iterator[Distribution]:
    """These distributions, and all that they need; pip is not shipped."""
    open_ends = [Requirement(name) for name in names]
    seen = {"pip"}
    while open_ends:
        wanted = open_ends.pop()
        key = str(wanted)
        if wanted.name in seen or key in seen:
            continue
        seen.add(key)
        try:
            found = distribution(wanted.name)
        except PackageNotFoundError:
            continue  # pyspark[connect] where it is not asked for
        yield found
        for text in found.requires or ():
            need = Requirement(text)
            extras = wanted.extras or {""}
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras):
                open_ends.append(need)


def _top_level(found: Distribution) -> set[str]:
    """Names in `site-packages`."""
    names = {file.parts[0] for file in found.files or ()}
    return {name for name in names if name not in ("..", "__pycache__", "/")}
