"""What a check found, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found: passed, failed (False) or not made (None), and in words what was seen.

    >>> print(Finding("rows", False, "training row 3 has no prompt"))
    FAILED   rows: training row 3 has no prompt
    """

    name: str
    passed: bool | None
    detail: str

    def __str__(self) -> str:
        state = {True: "passed ", False: "FAILED ", None: "skipped"}[self.passed]
        return f"{state}  {self.name}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found, in order; `str` writes it for a terminal.

    >>> print(Report("sums", (Finding("rows", True, "all have a prompt"), Finding("tools", None, "there are none"))))
    task sums: proved
      passed   rows: all have a prompt
      skipped  tools: there are none
    """

    task: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """True where no check failed."""
        return not any(finding.passed is False for finding in self.findings)

    def __str__(self) -> str:
        failed = sum(finding.passed is False for finding in self.findings)
        verdict = "proved" if not failed else f"{failed} of {len(self.findings)} checks failed"
        return "\n".join([f"task {self.task}: {verdict}", *(f"  {finding}" for finding in self.findings)])
