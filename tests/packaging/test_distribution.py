"""What people download: the wheel and the source distribution, file by file."""

import re
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import version
from pathlib import Path

from click.testing import CliRunner
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from readme_renderer import markdown

from reliablepub.cli import main
from tests.packaging.conftest import ROOT, Built

PACKAGES = ("reliablepub", "spark_sink")
# Where Spark looks for data sources: modules at the top level whose names begin with pyspark_.
DATA_SOURCES = {"pyspark_rabbitmq.py", "pyspark_reliablepub_outbox.py"}
FILES = {
    *(
        "CHANGELOG.md",
        "CODE_OF_CONDUCT.md",
        "CONTRIBUTING.md",
        "Containerfile",
        "LICENSE",
        "MAINTAINERS.md",
        "Makefile",
        "README.md",
        "SECURITY.md",
        "SUPPORT.md",
        "action.yml",
        "mkdocs.yml",
        "pyproject.toml",
        "PKG-INFO",
    )
}
FOLDERS = (".ci", "docs", "examples", "reliablepub", "spark_sink", "tests")


def files_of(folder: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_the_packages_the_data_sources_and_nothing_else(built: Built) -> None:
    ours = {name for name in built.in_wheel if ".dist-info/" not in name}
    moved = {f"spark_sink/{name}" for name in DATA_SOURCES}
    assert ours == DATA_SOURCES | files_of("reliablepub") | files_of("spark_sink") - moved
    about = {name.partition(".dist-info/")[2] for name in built.in_wheel} - {""}
    assert about == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert built.wheel.name.endswith("-py3-none-any.whl")  # nothing is compiled


def test_the_source_distribution_has_all_that_make_test_needs(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped - {".gitignore"} == FILES.union(*(files_of(folder) for folder in FOLDERS))


def test_the_source_distribution_builds_both_again(built: Built, tmp_path: Path) -> None:
    subprocess.run(["tar", "-xf", built.sdist, "-C", tmp_path], check=True)
    (unpacked,) = tmp_path.iterdir()
    (wheel,) = WheelBuilder(str(unpacked)).build(directory=str(tmp_path), versions=["standard"])
    assert Built(Path(wheel), built.sdist).in_wheel == built.in_wheel
    # Another directory and other times: every build is equal to the release, bit by bit.
    assert Path(wheel).read_bytes() == built.wheel.read_bytes()
    (sdist,) = SdistBuilder(str(unpacked)).build(directory=str(tmp_path), versions=["standard"])
    assert Path(sdist).read_bytes() == built.sdist.read_bytes()


def test_the_version_stands_in_one_place(built: Built) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert built.metadata["Version"] == project["version"] == version("reliablepub")
    assert CliRunner().invoke(main, ["--version"]).output == f"reliablepub {project['version']}\n"
    repeated = [
        module
        for package in PACKAGES
        for module in files_of(package)
        if f'"{project["version"]}"'.encode() in (ROOT / module).read_bytes()
    ]
    assert repeated == []


def test_the_metadata_says_what_holds(built: Built) -> None:
    metadata = built.metadata
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == {
        *("aio", "encryption", "observe", "postgres", "spark"),
        *("celery", "dashboard", "django", "dramatiq", "fastapi", "sqlalchemy", "taskiq"),
    }
    classifiers = metadata.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    here = f"Programming Language :: Python :: {sys.version_info.major}.{sys.version_info.minor}"
    assert here in classifiers
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_on_pypi_every_link_and_picture_leads_to_the_repository() -> None:
    """One variable fills them in; today it is empty, and the README is as it is here."""
    home = "https://forge.example/reliablepub"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    assert hook["repository"] == ""
    assert ProjectMetadata(str(ROOT), PluginManager(), project).core.urls == {}
    hook["repository"] = home
    core = ProjectMetadata(str(ROOT), PluginManager(), project).core
    page = markdown.render(core.readme)
    assert page is not None, "PyPI shows no page that it cannot render"
    pictures = re.findall(r'<img[^>]* src="([^"]+)"', page)
    links = [*re.findall(r'<a[^>]* href="([^"#][^"]*)"', page), *core.urls.values()]
    assert pictures
    inside = re.compile(rf"{home}/(?:blob|raw)/v{re.escape(project['project']['version'])}/([^#]+)")
    for address in (*pictures, *links):
        if found := inside.match(address):
            assert (ROOT / found[1]).exists(), address
        else:
            assert address.startswith("https://"), address
