"""What became of the mutants, and which survivors are explained.

A survivor is named by its function and by the lines that were changed, as mutmut's own numbers are
others after every change.
"""

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files
from mutmut.utils.format_utils import orig_function_and_class_names_from_key

EXPLANATIONS = Path(__file__).with_name("survivors.toml")
SURVIVED = ("survived", "no tests")


@dataclass(frozen=True)
class Survivor:
    """A change that no test notices.

    Attributes:
        function: its dotted name.
        was: the lines before, without indentation.
        now: the lines after.
    """

    function: str
    was: str
    now: str

    @classmethod
    def of(cls, name: str) -> "Survivor":
        """By mutmut's name of it."""
        function, class_name = orig_function_and_class_names_from_key(name)
        module = name.rpartition(".")[0]
        lines = get_diff_for_mutant(name).splitlines()[2:]
        was, now = (
            "\n".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
        )
        return cls(".".join(filter(None, (module, class_name, function))), was, now)

    @property
    def is_the_same_sql(self) -> bool:
        """Whether it is SQL in another case, which SQL does not mind."""
        return ".execute(" in self.was and self.was.lower() == self.now.lower()


@dataclass
class Module:
    """What became of the mutants of one module."""

    path: Path
    mutants: int
    refused: int
    hung: int
    unexplained: list[Survivor]
    explained: int

    @property
    def noticed(self) -> int:
        """How many mypy refused, or made a test fail or hang."""
        return self.mutants - self.explained - len(self.unexplained)


@dataclass
class Room:
    """All modules of a directory."""

    folder: Path
    modules: list[Module] = field(default_factory=list)
    outdated: list[Survivor] = field(default_factory=list)

    @property
    def mutants(self) -> int:
        """How many there are."""
        return sum(module.mutants for module in self.modules)

    @property
    def noticed(self) -> int:
        """How many of them mypy or a test has noticed."""
        return sum(module.noticed for module in self.modules)

    @property
    def explained(self) -> int:
        """How many survivors have an explanation."""
        return sum(module.explained for module in self.modules)

    def show(self) -> None:
        """Print the table, and the survivors without an explanation."""
        print(f"\n{'module':40} mutants  noticed  by mypy  by hanging  explained  survived")
        for module in self.modules:
            noticed = (module.mutants, module.noticed, module.refused, module.hung)
            survived = (module.explained, len(module.unexplained))
            numbers = "{:7}  {:7}  {:7}  {:10}  {:9}  {:8}".format(*noticed, *survived)
            print(f"{module.path!s:40} {numbers}")
        share = self.noticed / self.mutants
        print(f"{self.folder}: {self.noticed} of {self.mutants} noticed, {share:.1%}")
        for module in self.modules:
            for survivor in module.unexplained:
                print(f"\n{survivor.function}\n- {survivor.was}\n+ {survivor.now}")
        for survivor in self.outdated:
            print(f"\nexplained, and no survivor:\n{survivor}")


def room(folder: Path) -> Room:
    """What is known of the modules in a directory."""
    explanations = Counter(
        Survivor(entry["function"], entry["was"].strip(), entry["now"].strip())
        for entry in tomllib.loads(EXPLANATIONS.read_text()).get("survivor", ())
    )
    room = Room(folder)
    for path in sorted(walk_mutatable_files()):
        if (known := _module(path, explanations)) is not None:
            room.modules.append(known[0])
            room.outdated += known[1]
    return room


def _module(path: Path, explanations: Counter[Survivor]) -> tuple[Module, list[Survivor]] | None:
    """Its mutants, if all of them were run; and what is explained, but not there."""
    verdicts = SourceFileMutationData(path=path)
    verdicts.load()
    codes = verdicts.exit_code_by_key
    if not codes or None in codes.values():
        return None
    survivors = [
        Survivor.of(name) for name, code in codes.items() if status_by_exit_code[code] in SURVIVED
    ]
    prefix = ".".join(path.with_suffix("").parts) + "."
    left = Counter({s: n for s, n in explanations.items() if s.function.startswith(prefix)})
    to_explain = Counter(survivor for survivor in survivors if not survivor.is_the_same_sql)
    unexplained = list((to_explain - left).elements())
    came_to = Counter(status_by_exit_code[code] for code in codes.values())
    noticed = (came_to["caught by type check"], came_to["timeout"])
    module = Module(path, len(codes), *noticed, unexplained, len(survivors) - len(unexplained))
    return module, list((left - Counter(survivors)).elements())


def forget_survivors() -> None:
    """Have them run again: tests may have come that notice them."""
    for path in walk_mutatable_files():
        verdicts = SourceFileMutationData(path=path)
        verdicts.load()
        for name, code in verdicts.exit_code_by_key.items():
            if status_by_exit_code[code] in SURVIVED:
                verdicts.exit_code_by_key[name] = None
        if verdicts.exit_code_by_key:
            verdicts.save()
