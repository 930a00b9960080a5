"""Scores and rollouts are told as text, whatever is missing and however odd it is."""

from __future__ import annotations

from ramet.viewer.summary import Group, groups, prompt_text, score_rows


def test_rows_show_before_after_and_the_difference() -> None:
    before = {"score": 0.1, "low": 0.05, "high": 0.2, "problems": 90}
    after = {"score": 0.9, "low": 0.8, "high": 0.95, "problems": 100}
    summary = {
        "held_out": {"before": {"greedy": before, "sampled": before}, "after": {"greedy": after}},
        "difference": {"greedy": {"value": 0.8, "low": 0.7, "high": 0.9}},
    }
    greedy, sampled = score_rows(summary)
    assert greedy == (
        "greedy",
        "0.100 (0.050 to 0.200)",
        "0.900 (0.800 to 0.950)",
        "+0.800 (+0.700 to +0.900)",
        "100",
    )
    assert sampled == ("temperature 1", "0.100 (0.050 to 0.200)", "-", "-", "90")


def test_rows_of_nothing_and_of_odd_things() -> None:
    assert score_rows({}) == []
    assert score_rows({"held_out": None, "difference": 3}) == []
    assert score_rows({"held_out": {"before": {"<b>": {"score": "high"}}}})[0][:2] == ("<b>", "high")


def test_rollouts_are_gathered_by_problem_and_equal_prompts_of_two_problems_stay_apart() -> None:
    def record(when: str, group: int, completion: str) -> dict[str, object]:
        return {"when": when, "group": group, "prompt": "2+2=", "completion": completion}

    first, second, third = record("before", 0, "a"), record("before", 1, "b"), record("after", 1, "c")
    training = record("train", 0, "d")
    assert groups([first, second, training, third]) == [
        Group("2+2=", [first], []),
        Group("2+2=", [second], [third]),
    ]


def test_prompts_of_any_kind_are_text() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text"}]}]
    assert prompt_text(messages) == '[system]\nBe brief.\n[user]\n[{"type": "text"}]'
    assert prompt_text(None) == "null"
    assert prompt_text(["a", "b"]) == '["a", "b"]'
