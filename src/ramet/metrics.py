"""Intervals around a score, and the file that a run's numbers are written to."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ramet.errors import CheckpointError, DataError

Z = 1.959963984540054  # 97.5% of a normal distribution lies below
# 97.5% of Student's t lies below, for 1 to 30 degrees of freedom.
_T = (
    *(12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139),
    *(2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963),
    *(2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272),
)


class Interval(NamedTuple):
    """A number and the ends of its 95% confidence interval."""

    value: float
    low: float
    high: float


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Return the ends of the 95% interval for a share of `successes` in `n`; (0, 1) for n = 0.

    Stays inside [0, 1] and has a width at 0 and at n successes. Wilson, https://doi.org/10.1080/01621459.1927.10502953

    >>> low, high = wilson(8, 10)
    >>> f"{low:.3f} {high:.3f}"
    '0.490 0.943'
    """
    if not 0 <= successes <= n:
        raise ValueError(f"expected 0 <= successes <= n: found {successes} of {n}")
    if n == 0:
        return 0.0, 1.0
    share, scale = successes / n, 1 + Z * Z / n
    centre = (share + Z * Z / (2 * n)) / scale
    half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / scale
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean and its 95% interval: Wilson's where every value is 0 or 1, Student's t elsewhere.

    One value that is neither 0 nor 1 says nothing of the spread: its interval is (-inf, inf). Raises `ValueError` for
    no value, or one that is not finite.

    >>> mean_interval([1.0, 2.0, 3.0]).value
    2.0
    """
    _check(values, "values")
    if all(value in (0, 1) for value in values):
        successes = sum(1 for value in values if value == 1)
        return Interval(successes / len(values), *wilson(successes, len(values)))
    return _student(values)


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return the mean of `after` - `before` over the same problems, in the same order, and its 95% interval.

    Where every score is 0 or 1 it is the adjusted Wald interval of Bonett and Price (one problem added that was won and
    one that was lost), https://doi.org/10.3102/1076998611411915, which holds for few problems and has a width where
    none changed; elsewhere Student's t over the differences. Raises `ValueError` for unequal lengths, for no problem,
    or a score that is not finite.
    """
    if len(before) != len(after):
        raise ValueError(f"paired scores are of the same problems: found {len(before)} before and {len(after)} after")
    _check(before, "before")
    _check(after, "after")
    if not all(score in (0, 1) for score in (*before, *after)):
        return _student([b - a for a, b in zip(before, after, strict=True)])
    n = len(before)
    won = sum(1 for a, b in zip(before, after, strict=True) if a < b)
    lost = sum(1 for a, b in zip(before, after, strict=True) if a > b)
    up, down = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    half = Z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return Interval((won - lost) / n, max(up - down - half, -1.0), min(up - down + half, 1.0))


def clustered_mean(groups: Iterable[Sequence[float]]) -> Interval:
    """Return the mean over groups of each group's mean, with a 95% interval that takes the groups as the sample.

    Scores of one problem are alike, so that many of them say less than as many problems would: the interval is that of
    `mean_interval` over the groups' means, each of which weighs the same. Empty groups are left out. Raises
    `ValueError` where all are, and for a score that is not finite.

    >>> clustered_mean([[1.0, 0.0], [1.0]]).value
    0.75
    """
    kept = [list(group) for group in groups if len(group)]
    for number, group in enumerate(kept):
        _check(group, f"group {number}")
    return mean_interval([math.fsum(group) / len(group) for group in kept])


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate, from `samples` of which `passed`, that at least one of `k` passes.

    1 - C(samples - passed, k) / C(samples, k): the share of the subsets of `k` samples that hold one that passed.
    https://arxiv.org/abs/2107.03374. Raises `ValueError` unless 0 <= passed <= samples and 1 <= k <= samples.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"expected 0 <= passed <= samples and 1 <= k <= samples: found {samples} samples, {passed} passed, k = {k}"
        )
    all_subsets = math.comb(samples, k)
    return (all_subsets - math.comb(samples - passed, k)) / all_subsets


def mean_pass_at_k(counts: Iterable[tuple[int, int]], k: int) -> Interval:
    """Return `pass_at_k` over problems, each given as (samples, passed), and its 95% interval, within [0, 1].

    The estimates of the problems are independent, so the interval is that of their mean, by `mean_interval`. Raises
    `ValueError` for no problem.

    >>> mean_pass_at_k([(4, 1), (4, 4)], k=2).value
    0.75
    """
    value, low, high = mean_interval([pass_at_k(samples, passed, k) for samples, passed in counts])
    return Interval(value, max(low, 0.0), min(high, 1.0))


class MetricsLog:
    """An append-only file of JSON lines, each with its integer `step`; one flush a line.

    Numbers that are not finite become null, so that every line is valid JSON. A last line that a crash cut short is
    removed when the file is opened again. `rollouts.jsonl` is written with the same class.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _cut_torn_line(path)
        self._file: TextIO = path.open("a", encoding="ascii")

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one line. Raises `ValueError` without an integer `step`, `TypeError` for what JSON cannot hold.

        Raises `CheckpointError` where the disk takes no more.
        """
        step = entry.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise ValueError(f'each entry has an integer "step": found {step!r}')
        # ASCII: a lone surrogate in a model's text becomes an escape, where UTF-8 would refuse it.
        line = json.dumps(finite(entry, "entry"), allow_nan=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # what is left in the buffer can not be written by closing either
                self._file.close()
            hint = "make room: what was written before is whole, and a run goes on with --resume (resume=True)"
            raise CheckpointError(f"{self.path} can not be written: {error}", hint=hint) from error

    def extend(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Write one line for each entry."""
        for entry in entries:
            self.append(entry)

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Keep the entries that are `wanted` alone, all at once: a crash leaves the old file or the new one."""
        self._file.close()
        partial = self.path.with_name(self.path.name + ".partial")
        with partial.open("w", encoding="ascii") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries(self.path) if wanted(entry))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)
        self._file = self.path.open("a", encoding="ascii")

    def close(self) -> None:
        """Close the file; calling it twice is fine."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return all `entries` of a file of JSON lines."""
    return list(entries(path))


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a file of JSON lines; a last line without its line break was cut short and is left out.

    Raises `DataError`, naming file and line, for any other line that is no JSON object.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            text = line[:-1].decode("utf-8", errors="backslashreplace")
            try:
                entry = json.loads(text)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}: expected a JSON object, found {text[:60]!r}") from error
            if not isinstance(entry, dict):
                raise DataError(f"{path}, line {number}: expected a JSON object, found {text[:60]!r}")
            yield entry


def is_torn(path: Path) -> bool:
    """Return whether the last line of a file was cut short: `entries` leaves it out."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _check(values: Sequence[float], name: str) -> None:
    if not values:
        raise ValueError(f"{name}: expected at least one score, found none")
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"{name}[{index}] must be finite: found {value}")


def _student(values: Sequence[float]) -> Interval:
    """Return the mean with the interval of Student's t."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = _student_quantile(n - 1) * spread / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def _student_quantile(freedom: int) -> float:
    """Return where 97.5% of Student's t lies below: a table, then its expansion in 1/freedom (error under 1e-6)."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3


def finite(value: Any, where: str) -> Any:
    """Return `value` as JSON can hold it; numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): finite(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    raise TypeError(f"{where}: JSON holds numbers, strings, lists and mappings: found {type(value).__name__}")


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
