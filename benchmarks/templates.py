"""Print the conformance table of docs/templates.md: what a conversation makes of chat templates of many families.

python -m benchmarks.templates
"""

from __future__ import annotations

from tests.chat.conformance import FAMILIES, Family, Found, measure

COLUMNS = ("plain", "system", "edges", "empty", "cut", "thinking", "call", "parallel")
HEAD = f"| template | {' | '.join(COLUMNS)} | after 4 turns equal | between answer and reply, behind the reply |"


def cell(found: Found | str, rounds: int) -> str:
    """Return what became of one conversation, in a word."""
    if isinstance(found, str):
        return "left out" if "leaves out" in found else "refused"
    if found.forks:
        return "forks" if found.forks == rounds else f"forks {found.forks}/{rounds}"
    return ("appends" if found.same_ids else "appends, text") + ("*" if found.unwritten else "")


def shown(text: str) -> str:
    """Return text for a cell of a table."""
    return "`" + text.replace("\n", "⏎").replace("|", "\\|") + "`" if text else "nothing"


def row(family: Family, rounds: int, reply: str) -> str:
    """Return the line of one template."""
    found = measure(family)
    kept = [one for one in found.values() if isinstance(one, Found)]
    equal = (
        "text and ids" if all(one.same_ids for one in kept) else "text" if all(one.same_text for one in kept) else "no"
    )
    seams = [one.seam for one in kept if one.seam and reply in one.seam]
    before, after = seams[0].split(reply, 1) if seams else ("", "")
    seam = f"{shown(before)} {shown(after)}" if seams else "rewritten each time"
    cells = [cell(found[name], rounds) for name in COLUMNS]
    where = f"{family.name} ({family.package} {family.version})" if family.package else family.name
    return f"| {where} | {' | '.join(cells)} | {equal} | {seam} |"


def lines() -> list[str]:
    """Return the lines of the table; a template of a package that is not installed has none."""
    from tests.chat.conformance import REPLY, ROUNDS

    table = [HEAD, "|" + "---|" * (len(COLUMNS) + 3)]
    for family in FAMILIES:
        try:
            table.append(row(family, ROUNDS, REPLY))
        except LookupError:
            continue
    return table


if __name__ == "__main__":
    print("\n".join(lines()))
