"""What a module may import, and a few rules that every module of the package keeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"

# A module or folder imports only from lines above its own. Each entry is a file or a folder of src/ramet.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("types",),
    ("errors",),
    ("specs", "ragged", "toml", "kl", "advantages", "metrics", "events", "interrupts", "http"),
    # How things run at once: it knows nothing of what runs.
    ("concurrency",),
    # A loss may hold a divergence.
    ("losses",),
    ("forest",),
    ("attention",),
    ("scoring",),
    ("prompts",),
    ("chat",),
    ("tools",),
    ("transforms",),
    ("tasks", "models"),
    ("envs",),
    ("policies",),
    ("episodes",),
    ("rollouts", "checking"),
    # What a run is made of, and then the loop that uses it.
    ("config",),
    ("assembly", "checkpoint", "evaluation", "learner"),
    ("warm_start", "run_folder"),
    ("trainer",),
    # Side roads: they may use all of the flow, and nothing of the flow may use them.
    ("search", "adapters", "recipes", "viewer"),
    ("cli",),
)
LINE = {name: line for line, names in enumerate(LAYERS) for name in names}
ONLY_IMPORTED_BY = {"viewer": ("cli",)}
MEANINGLESS = {"utils", "common", "core", "helpers", "base", "misc", "util", "helper"}
GLOBAL_SEEDS = {
    "torch.manual_seed",
    "torch.random.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "torch.seed",
    "np.random.seed",
    "numpy.random.seed",
    "random.seed",
}

Source = tuple[str, ast.Module]
"""Dotted name and tree of a module; a package is named `package.__init__`."""


def parse(name: str, text: str) -> Source:
    return name, ast.parse(text)


def sources() -> Iterator[Source]:
    for path in sorted((SRC / "ramet").rglob("*.py")):
        yield parse(".".join(path.relative_to(SRC).with_suffix("").parts), path.read_text(encoding="utf-8"))


def folder(name: str) -> str:
    """The entry of the table that a module belongs to; empty for the package's own __init__."""
    entry = [*name.split("."), ""][1]
    return "" if entry == "__init__" else entry


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything of ramet that a module imports, in functions and for type checkers too."""
    name, tree = source
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(name.split(".")[: -node.level]) if node.level else ""
            module = ".".join(part for part in (above, node.module) if part)
            # In `from ramet import kl` the names are modules; elsewhere the module alone decides.
            names = [f"ramet.{alias.name}" for alias in node.names] if module == "ramet" else [module]
        else:
            continue
        yield from ((node.lineno, found) for found in names if found.split(".")[0] == "ramet")


def import_faults(source: Source) -> list[str]:
    """The imports of one module that point down or sideways."""
    name, faults = source[0], []
    own = folder(name)
    for lineno, target in imported(source):
        other = folder(target)
        where = f"{name}, line {lineno}, imports {target}: "
        if target == "ramet.__version__":
            continue
        if other == "cli" and own != "cli":
            faults.append(where + "nobody imports cli")
        elif own not in ONLY_IMPORTED_BY.get(other, (own,)) and own != other:
            faults.append(where + f"only {' and '.join(ONLY_IMPORTED_BY[other])} may")
        elif own in ("", other):
            continue
        elif other not in LINE:
            faults.append(where + f"{other or 'the package'} has no line in LAYERS; import the module that defines it")
        elif own in LINE and LINE[other] >= LINE[own]:
            faults.append(where + "a module imports only from lines above its own (LAYERS in tests/test_layers.py)")
    return faults


def kwargs_faults(source: Source) -> list[str]:
    """Public functions and methods with **kwargs, which would swallow a misspelt option."""

    def visit(body: list[ast.stmt], path: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from visit(node.body, f"{path}.{node.name}")
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.args.kwarg is None:
                continue
            if not node.name.startswith("_") or node.name.endswith("__"):
                yield f"{path}.{node.name}, line {node.lineno}, takes **{node.args.kwarg.arg}"

    return list(visit(source[1].body, source[0]))


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression made of names and attributes alone; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{left}.{node.attr}" if (left := dotted(node.value)) else ""
    return ""


def print_faults(source: Source) -> list[str]:
    """Calls of print: only cli speaks to the terminal."""
    calls = [node for node in ast.walk(source[1]) if isinstance(node, ast.Call) and dotted(node.func) == "print"]
    return [] if folder(source[0]) == "cli" else [f"{source[0]}, line {call.lineno}, prints" for call in calls]


def seed_faults(source: Source) -> list[str]:
    """Uses of a global random state's seed."""
    uses = []
    for node in ast.walk(source[1]):
        if isinstance(node, ast.Attribute):
            uses.append((node.lineno, dotted(node)))
        elif isinstance(node, ast.ImportFrom):
            uses += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return [f"{source[0]}, line {lineno}, uses {name}" for lineno, name in sorted(uses) if name in GLOBAL_SEEDS]


def test_every_module_imports_only_from_lines_above_its_own() -> None:
    assert [fault for source in sources() for fault in import_faults(source)] == []


def test_every_module_has_a_line() -> None:
    unknown = sorted({folder(name) for name, _ in sources()} - {""} - set(LINE))
    assert not unknown, (
        f"src/ramet/ holds {unknown}, which LAYERS in tests/test_layers.py does not know: add each to the line "
        "below everything that it imports and above everything that imports it"
    )


def test_no_entry_has_two_lines() -> None:
    assert sorted(LINE) == sorted(name for names in LAYERS for name in names)


def test_every_name_says_something() -> None:
    """A module called utils has no limits."""
    parts = {(name, part.strip("_")) for name, _ in sources() for part in name.split(".")}
    assert sorted(name for name, part in parts if part in MEANINGLESS) == []


def test_no_public_function_takes_kwargs() -> None:
    assert [fault for source in sources() for fault in kwargs_faults(source)] == []


def test_only_cli_prints() -> None:
    assert [fault for source in sources() for fault in print_faults(source)] == []


def test_nobody_seeds_a_global_random_state() -> None:
    assert [fault for source in sources() for fault in seed_faults(source)] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ramet.kl", "import ramet.types, ramet.errors"),
        ("ramet.forest.forest", "from ramet.forest.hashing import SipHash\nfrom .nodes import Nodes"),
        ("ramet.forest.__init__", "from .forest import Forest"),
        ("ramet.trainer", "from ramet import config, losses\nfrom ramet.rollouts import collect"),
        ("ramet.cli.run", "from ramet.viewer.page import page\nfrom ramet import __version__\nimport ramet.cli.main"),
        ("ramet.viewer.page", "from ramet.viewer.plot import plot\nfrom ramet.trainer import Trainer"),
        ("ramet.__init__", "if TYPE_CHECKING:\n    from ramet.trainer import Trainer"),
        ("ramet.kl", "import torch\nfrom typing import cast"),
    ],
)
def test_the_check_lets_pass_what_points_up(name: str, text: str) -> None:
    assert import_faults(parse(name, text)) == []


@pytest.mark.parametrize(
    ("name", "text", "target"),
    [
        ("ramet.types", "from ramet.errors import DataError", "ramet.errors"),
        ("ramet.kl", "import ramet.losses", "ramet.losses"),
        ("ramet.kl", "import ramet.advantages", "ramet.advantages"),
        ("ramet.kl", "def f():\n    from ramet.forest import Forest", "ramet.forest"),
        ("ramet.kl", "if TYPE_CHECKING:\n    from .rollouts import collect", "ramet.rollouts"),
        ("ramet.policies.policy", "from ramet import trainer", "ramet.trainer"),
        ("ramet.forest.__init__", "from ..trainer import Trainer", "ramet.trainer"),
        ("ramet.envs.env", "from ramet import Forest", "ramet.Forest"),
        ("ramet.envs.env", "import ramet", "ramet"),
        ("ramet.tasks.sums", "from ramet.models.tiny import tiny", "ramet.models.tiny"),
        ("ramet.trainer", "from ramet.viewer.page import page", "ramet.viewer.page"),
        ("ramet.recipes.sums", "from ramet.viewer import page", "ramet.viewer"),
        ("ramet.__init__", "from ramet.viewer import page", "ramet.viewer"),
        ("ramet.__init__", "from ramet.cli.main import main", "ramet.cli.main"),
        ("ramet.viewer.page", "from ramet.cli.main import main", "ramet.cli.main"),
    ],
)
def test_the_check_finds_what_points_down_or_sideways(name: str, text: str, target: str) -> None:
    (fault,) = import_faults(parse(name, text))
    assert f"{name}, line" in fault
    assert f"imports {target}: " in fault


def test_the_check_finds_public_kwargs_alone() -> None:
    text = """
def open(**options): ...
async def close(*, a, **rest): ...
def _private(**kwargs): ...
class Box:
    def __init__(self, **kwargs):
        def inner(**kwargs): ...
    def _hidden(self, **kwargs): ...
class _Box:
    def put(self, **kwargs): ...
"""
    assert kwargs_faults(parse("m", text)) == [
        "m.open, line 2, takes **options",
        "m.close, line 3, takes **rest",
        "m.Box.__init__, line 6, takes **kwargs",
    ]


def test_the_check_finds_prints_outside_cli() -> None:
    assert print_faults(parse("ramet.kl", "def f():\n    print(1)\n    console.print(1)")) == [
        "ramet.kl, line 2, prints"
    ]
    assert print_faults(parse("ramet.cli.run", "print(1)")) == []


def test_the_check_finds_global_seeds_but_no_generators() -> None:
    text = "torch.manual_seed(0)\nnp.random.seed(0)\ngenerator.manual_seed(0)\nrandom.seed(1)\nfrom random import seed"
    assert seed_faults(parse("m", text)) == [
        "m, line 1, uses torch.manual_seed",
        "m, line 2, uses np.random.seed",
        "m, line 4, uses random.seed",
        "m, line 5, uses random.seed",
    ]
