"""Print the conformance table of docs/templates.md: what a conversation makes of chat templates of many families.

python -m benchmarks.templates
"""

from __future__ import annotations

from tests.chat.conformance import FAMILIES, Family
from tests.chat.measured import EQUALITIES, ROUNDS, Found, measure, seam_of

COLUMNS = ("plain", "system", "edges", "empty", "cut", "thinking", "call", "parallel", "odd calls", "all of it")
CALLED = ("call", "parallel")
HEAD = (
    f"| template | {' | '.join(COLUMNS)} | equal at each turn | with calls as calls "
    "| between answer and reply, behind the reply |"
)


def cell(found: Found | str) -> str:
    """Return what became of one conversation, in a word or two."""
    if isinstance(found, str):
        return "left out" if "leaves out" in found else "refused"
    if found.forks:
        return "forks" if found.forks == ROUNDS else f"forks {found.forks}/{ROUNDS}"
    word = {"text and ids": "appends", "text": "appends, text"}.get(found.equal, f"appends, {found.equal}")
    return word + ("*" if found.unwritten else "")


def called(found: Found | str) -> str:
    """Return how a conversation compares with the rendering of its calls as calls."""
    return cell(found) if isinstance(found, str) else found.structured


def shown(text: str) -> str:
    """Return text for a cell of a table."""
    return "`" + text.replace("\n", "⏎").replace("|", "\\|") + "`" if text else "nothing"


def row(family: Family) -> str:
    """Return the line of one template."""
    found = measure(family)
    equal = max((one.equal for one in found.values() if isinstance(one, Found)), key=EQUALITIES.index)
    calls = {called(found[name]) for name in CALLED}
    cells = [
        *(cell(found[name]) for name in COLUMNS),
        equal,
        calls.pop() if len(calls) == 1 else ", ".join(f"{name}: {called(found[name])}" for name in CALLED),
        " ".join(shown(part) for part in seam_of(family)),
    ]
    where = f"{family.name} ({family.package} {family.version})" if family.package else family.name
    return f"| {where} | {' | '.join(cells)} |"


def lines() -> list[str]:
    """Return the lines of the table; a template of a package that is not installed has none."""
    table = [HEAD, "|" + "---|" * (len(COLUMNS) + 4)]
    for family in FAMILIES:
        try:
            table.append(row(family))
        except LookupError:
            continue
    return table


if __name__ == "__main__":
    print("\n".join(lines()))
