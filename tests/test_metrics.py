"""Intervals against hand-worked numbers and slow oracles; the log survives crashes, cuts and odd numbers."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.errors import DataError
from ramet.metrics import (
    Interval,
    MetricsLog,
    Z,
    clustered_mean,
    mean_interval,
    mean_pass_at_k,
    paired_difference,
    pass_at_k,
    read,
    wilson,
)


def test_wilson_by_hand() -> None:
    """Tolerance 1e-6: the numbers below have six digits."""
    # No success in 10: the upper end is z^2 / (n + z^2) = 3.841459 / 13.841459.
    assert wilson(0, 10) == pytest.approx((0.0, 3.841459 / 13.841459), abs=1e-6)
    assert wilson(10, 10) == pytest.approx((10 / 13.841459, 1.0), abs=1e-6)
    assert (wilson(0, 10)[0], wilson(10, 10)[1]) == (0.0, 1.0)
    # 5 in 10: centre 1/2, half-width z * sqrt(1/40 + z^2/400) / (1 + z^2/10) = 0.263406.
    assert wilson(5, 10) == pytest.approx((0.236594, 0.763406), abs=1e-6)
    assert wilson(0, 0) == (0.0, 1.0)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_ends_of_wilson_are_where_the_share_is_z_standard_errors_away(counts: tuple[int, int]) -> None:
    """Both sides of the equation that defines them agree within 1e-12, float64."""
    successes, n = counts
    low, high = wilson(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    for end in (low, high):
        # (share - p)^2 = z^2 p (1 - p) / n defines the interval; at the clamped ends both sides are 0.
        assert (successes / n - end) ** 2 == pytest.approx(Z * Z * end * (1 - end) / n, abs=1e-12)


@pytest.mark.parametrize(("successes", "n"), [(-1, 3), (4, 3), (0, -1)])
def test_wilson_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= successes <= n"):
        wilson(successes, n)


def test_the_mean_of_zeros_and_ones_has_wilsons_interval() -> None:
    assert mean_interval([1.0, 0.0, 1, 0.0]) == Interval(0.5, *wilson(2, 4))
    assert mean_interval([1.0]) == Interval(1.0, *wilson(1, 1))


def test_the_mean_of_other_numbers_has_students_interval() -> None:
    """Tolerance 1e-6: the numbers below have six digits."""
    # Mean 2, spread 1, 2 degrees of freedom: 4.302653 / sqrt(3) = 2.484138.
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.0 - 2.484138, 2.0 + 2.484138), abs=1e-6)


def test_one_number_says_nothing_of_the_spread() -> None:
    assert mean_interval([0.5]) == Interval(0.5, -math.inf, math.inf)
    assert paired_difference([0.5], [0.75]) == Interval(0.25, -math.inf, math.inf)


def test_scores_of_one_problem_count_as_one() -> None:
    """Means 0.5, 1 and 0 (a score more or less weighs nothing): mean 0.5, spread 0.5. Tolerance 1e-6: six digits."""
    found = clustered_mean([[1.0, 0.0], [1.0, 1.0, 1.0], [], [0.0]])
    half = 4.302653 * 0.5 / math.sqrt(3)
    assert found == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-6)


def test_many_samples_of_few_problems_are_no_more_sure_than_the_problems() -> None:
    """Ten equal samples of each of 4 problems have Wilson's interval of 4, not of 40."""
    assert clustered_mean([[1.0] * 10, [1.0] * 10, [0.0] * 10, [1.0] * 10]) == Interval(0.75, *wilson(3, 4))


def test_a_clustered_mean_needs_a_score() -> None:
    with pytest.raises(ValueError, match="at least one score"):
        clustered_mean([[], []])
    with pytest.raises(ValueError, match=r"group 1\[0\] must be finite: found nan"):
        clustered_mean([[1.0], [], [math.nan]])


def test_pass_at_k_by_hand() -> None:
    # 4 samples, 1 passed: of the 6 pairs 3 hold it; of the 4 triples 3 do.
    assert [pass_at_k(4, 1, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    # 5 samples, 2 passed: 1 - C(3, 2) / C(5, 2) = 1 - 3/10.
    assert pass_at_k(5, 2, 2) == 0.7
    assert [pass_at_k(9, 0, 3), pass_at_k(9, 9, 1)] == [0.0, 1.0]
    # 2,000 samples: the binomials have hundreds of digits, and their ratio is exact.
    assert pass_at_k(2000, 1, 500) == 0.25


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.lists(st.booleans(), min_size=n, max_size=n), st.integers(1, n)))
)
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_one_that_passed(case: tuple[list[bool], int]) -> None:
    """Agrees with listing every subset of k samples; both are one division of the same whole numbers."""
    passed, k = case
    subsets = list(itertools.combinations(passed, k))
    assert pass_at_k(len(passed), sum(passed), k) == sum(any(subset) for subset in subsets) / len(subsets)


@pytest.mark.parametrize(("samples", "passed", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4), (0, 0, 1)])
def test_pass_at_k_refuses_what_can_not_be(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"found {samples} samples, {passed} passed, k = {k}"):
        pass_at_k(samples, passed, k)


def test_pass_at_k_over_problems_by_hand() -> None:
    """Estimates 0.5, 1 and 0: mean 0.5, half-width 4.302653 * 0.5 / sqrt(3) = 1.242, cut to [0, 1]."""
    assert mean_pass_at_k([(4, 1), (4, 4), (2, 0)], k=2) == Interval(0.5, 0.0, 1.0)
    # With k = n each estimate is 0 or 1: 2 problems of 3.
    assert mean_pass_at_k([(2, 1), (2, 2), (2, 0)], k=2) == Interval(2 / 3, *wilson(2, 3))
    with pytest.raises(ValueError, match="at least one score"):
        mean_pass_at_k([], k=1)


@pytest.mark.parametrize("k", [1, 4, 8])
def test_the_interval_of_pass_at_k_holds_the_truth_as_often_as_it_says(k: int) -> None:
    """400 draws of 60 problems whose chances are spread evenly over [0, 1], 8 samples each: the truth is k / (k + 1).

    Of 400, 95% would be 380, give or take 4.4; 363 are four times that fewer.
    """
    rng, held = random.Random(0), 0
    for _ in range(400):
        chances = [rng.random() for _ in range(60)]
        counts = [(8, sum(rng.random() < chance for _ in range(8))) for chance in chances]
        _, low, high = mean_pass_at_k(counts, k)
        held += low <= k / (k + 1) <= high
    assert held >= 363


@pytest.mark.parametrize("freedom", [1, 2, 7, 30, 31, 60, 400])
def test_students_quantile_agrees_with_integrating_the_density(freedom: int) -> None:
    """The probability below it is 0.975 within 2e-7: a table of six digits, and an expansion as good beyond it."""
    n = freedom + 1
    values = [2.0] * (n // 2) + [4.0] * (n // 2) + [3.0] * (n % 2)
    mean, low, high = mean_interval(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / freedom)
    quantile = (high - low) / 2 / (spread / math.sqrt(n))
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    pieces = 4000
    width = quantile / pieces
    density = [scale * (1 + (i * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(pieces + 1)]
    simpson = sum(value * (1 if i in (0, pieces) else 4 if i % 2 else 2) for i, value in enumerate(density))
    assert 0.5 + simpson * width / 3 == pytest.approx(0.975, abs=2e-7)


def test_paired_zeros_and_ones_by_hand() -> None:
    """Tolerance 1e-6: the numbers below have six digits."""
    # 10 problems, 5 won and 1 lost. With one more of each: 6/12 and 2/12, centre 1/3,
    # half-width 1.959964 * sqrt((2/3 - 1/9) / 12) = 0.421718; the difference itself is 4/10.
    before = [0] * 5 + [1] + [0, 0, 1, 1]
    after = [1] * 5 + [0] + [0, 0, 1, 1]
    assert paired_difference(before, after) == pytest.approx((0.4, 1 / 3 - 0.421718, 1 / 3 + 0.421718), abs=1e-6)


def test_a_paired_difference_has_a_width_where_nothing_changed_and_stays_in_range() -> None:
    """Tolerance 1e-7, the last digit below; the ends of the range are exact."""
    # 2 cells of 1/102 each: half-width 1.959964 * sqrt((2/102) / 102) = 0.0271746.
    assert paired_difference([1.0] * 100, [1.0] * 100) == pytest.approx((0.0, -0.0271746, 0.0271746), abs=1e-7)
    assert paired_difference([0.0], [1.0]).high == 1.0
    assert paired_difference([1.0] * 3, [0.0] * 3).low == -1.0


def test_paired_scores_of_other_values_have_students_interval_over_the_differences() -> None:
    assert paired_difference([0.5, 1.0, 0.0], [1.5, 3.0, 3.0]) == mean_interval([1.0, 2.0, 3.0])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
def test_a_paired_interval_holds_its_difference_and_turns_with_the_sides(pairs: list[tuple[int, int]]) -> None:
    """Mirrored within 1e-12, float64."""
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    forth, back = paired_difference(before, after), paired_difference(after, before)
    assert -1 <= forth.low <= forth.value <= forth.high <= 1
    assert (forth.value, forth.low, forth.high) == pytest.approx((-back.value, -back.high, -back.low), abs=1e-12)


def test_no_scores_unpaired_scores_and_scores_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])
    with pytest.raises(ValueError, match="at least one"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="2 before and 1 after"):
        paired_difference([1, 0], [1])
    with pytest.raises(ValueError, match=r"values\[1\] must be finite"):
        mean_interval([0.0, math.nan])
    with pytest.raises(ValueError, match=r"after\[0\] must be finite"):
        paired_difference([0.0], [math.inf])


def test_each_entry_is_on_disk_at_once_and_reads_back(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append({"step": 1, "reward": 0.5, "held_out": {"greedy": {"score": 1.0}}})
        assert read(log.path) == [{"step": 1, "reward": 0.5, "held_out": {"greedy": {"score": 1.0}}}]
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append({"step": 2, "words": ["a\nb", "\ud800", "é"]})
    assert [entry["step"] for entry in read(log.path)] == [1, 2]
    assert read(log.path)[1]["words"] == ["a\nb", "\ud800", "é"]


def test_numbers_that_are_not_finite_become_null_and_every_line_is_valid_json(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append({"step": 1, "kl": math.nan, "deep": {"list": [math.inf, -math.inf, 1.0, (math.nan,)]}})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    line = log.path.read_text(encoding="ascii")
    assert json.loads(line, parse_constant=refuse) == {
        "step": 1,
        "kl": None,
        "deep": {"list": [None, None, 1.0, [None]]},
    }


@pytest.mark.parametrize("entry", [{}, {"step": None}, {"step": "1"}, {"step": 1.0}, {"step": True}])
def test_an_entry_without_an_integer_step_is_refused(entry: dict[str, object], tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        with pytest.raises(ValueError, match="integer"):
            log.append(entry)
        assert read(log.path) == []


def test_what_json_cannot_hold_is_refused_by_its_place_and_nothing_is_written(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        with pytest.raises(TypeError, match=r"entry\.a\[1\].*object"):
            log.append({"step": 1, "a": [0, object()]})
        assert read(log.path) == []


def test_a_line_cut_short_by_a_crash_is_left_out_and_then_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew', encoding="utf-8")
    assert read(path) == [{"step": 1}]
    with MetricsLog(path) as log:
        log.append({"step": 2})
    assert read(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("line", ["nonsense", "[1]", "", "3"])
def test_any_other_line_that_is_no_object_is_an_error_with_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        read(path)


@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [0, 1]), (9, [0, 1, 2, 3])])
def test_keeping_what_came_before_a_step_and_goes_on_from_there(step: int, kept: list[int], tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for number in range(4):
            log.append({"step": number, "when": "é"})
        log.keep(lambda entry: entry["step"] < step)
        log.append({"step": 10})
    assert [entry["step"] for entry in read(log.path)] == [*kept, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_keep_that_fails_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for number in range(3):
            log.append({"step": number})
        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            log.keep(lambda entry: entry["step"] < 1)
    assert [entry["step"] for entry in read(log.path)] == [0, 1, 2]
