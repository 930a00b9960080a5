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

    @property
    def proved(self) -> bool:
        """True where no check failed and the reference was not skipped: right answers were seen to earn all."""
        skipped = any(finding.name == "reference" and finding.passed is None for finding in self.findings)
        return self.passed and not skipped

    def __str__(self) -> str:
        failed = sum(finding.passed is False for finding in self.findings)
        verdict = f"{failed} of {len(self.findings)} checks failed"
        if not failed:
            unproved = "passed, but nothing shows that a right answer earns full reward (no reference)"
            verdict = "proved" if self.proved else unproved
        return "\n".join([f"task {self.task}: {verdict}", *(f"  {finding}" for finding in self.findings)])
