"""Held-out scores: the same problems and draws each time, what has no score left out, differences in pairs."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ramet.chat import ChatTemplate
from ramet.envs.llm import LLMEnv
from ramet.episodes import Played, Rules, Start, play_episodes
from ramet.errors import ModelError, TooManyFailures
from ramet.evaluation import Evaluation, difference, evaluate, record_of, rollout_records, tally
from ramet.forest import Forest
from ramet.metrics import Interval, MetricsLog, clustered_mean, paired_difference, read, wilson
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.policies.person import PersonPolicy, script_tokenizer
from ramet.policies.policy import Policy
from ramet.policies.scripted import ScriptedPolicy
from ramet.policies.transformers import TransformersPolicy
from ramet.prompts import Prompts
from ramet.rollouts import OneTurn, collect, first_failure, judge_rollouts, samples_of
from ramet.tasks.judge import Judge
from ramet.tasks.task import Task
from ramet.types import Completion, Draw, Episode, Outcome, Request, Sample, Sampling, StopReason, ToolCall

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(6)]


def scripted(answers: Sequence[str]) -> Policy:
    """A policy that gives the answer of that number to each problem, whatever the decoding."""

    def script(request: Request) -> list[int]:
        return [*TOKENIZER(answers[request.draw.prompt], add_special_tokens=False)["input_ids"], EOS]

    return ScriptedPolicy(script, eos_token_id=EOS)


def right(sample: Sample) -> float:
    return float(sample.completion == sample.row["answer"])


def run(policy: Policy, reward: Callable[[Sample], Any] = right, *, problems: int = 6, **named: Any) -> Evaluation:
    options = {"seed": 3, "when": "before", "step": 0, **named}
    play = OneTurn(LLMEnv(from_text=False, eos_token_id=EOS), policy, TOKENIZER, Judge(reward))
    return evaluate(play, Prompts(ROWS, TOKENIZER), problems=problems, sampling=Sampling(4, 0.5), **options)


class Recorder(TransformersPolicy):
    """A policy that remembers what it was asked."""

    def __init__(self, seed: int) -> None:
        super().__init__(tiny_llama(TOKENIZER, seed=seed, hidden_size=32, layers=1, heads=2, intermediate_size=32))
        self.asked: list[tuple[Draw, Sampling, tuple[int, ...]]] = []

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        self.asked += [(request.draw, request.sampling, tuple(request.tokens.tolist())) for request in requests]
        return super().complete(requests)


def test_each_decoding_scores_the_first_problems_in_the_order_of_the_data() -> None:
    found = run(scripted(["1", "2", "9", "4"]), problems=4)
    expected = {0: 1.0, 1: 1.0, 2: 0.0, 3: 1.0}
    assert found.scores == {"greedy": expected, "sampled": expected}
    held_out = found.held_out()
    assert held_out["greedy"]["score"] == 0.75
    assert held_out["greedy"]["problems"] == 4
    assert held_out["greedy"]["low"] < 0.75 < held_out["greedy"]["high"]


def test_more_problems_than_there_are_means_all() -> None:
    assert len(run(scripted(["1"] * 6), problems=50).scores["greedy"]) == 6


def test_before_and_after_ask_the_same_problems_with_the_same_settings_and_draws() -> None:
    """Other weights, another time: only the answers may differ."""
    before, after = Recorder(0), Recorder(1)
    first = run(before, lambda sample: len(sample.completion_tokens))
    second = run(after, lambda sample: len(sample.completion_tokens), when="after", step=9)
    assert before.asked == after.asked
    assert len(before.asked) == 12
    assert [sampling.temperature for _, sampling, _ in before.asked] == [0.0] * 6 + [1.0] * 6
    assert len({draw for draw, _, _ in before.asked[6:]}) == 6
    said = [[record["completion_tokens"] for record in made.records] for made in (first, second)]
    assert said[0] != said[1]
    again = run(Recorder(0), lambda sample: len(sample.completion_tokens))
    assert again.records == first.records


def test_an_evaluation_draws_from_all_tokens_and_stops_where_training_does() -> None:
    policy, asked = ScriptedPolicy(lambda request: [EOS]), list[Sampling]()

    class Listening(Policy):
        def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
            for request in requests:
                asked.append(request.sampling)
                plain = replace(request, sampling=Sampling(4))
                yield from policy.complete([plain])

    training = Sampling(4, 0.5, stop_ids=(7,), top_k=3, top_p=0.5, min_p=0.2, stop=("ab",))
    play = OneTurn(LLMEnv(from_text=False, eos_token_id=EOS), Listening(), TOKENIZER, Judge(right))
    evaluate(play, Prompts(ROWS, TOKENIZER), problems=2, sampling=training, seed=3, when="before", step=0)
    assert asked == [Sampling(4, t, stop_ids=(7,), stop=("ab",)) for t in (0.0, 0.0, 1.0, 1.0)]


def test_the_draws_are_the_seeds() -> None:
    one, other = Recorder(0), Recorder(0)
    run(one)
    run(other, seed=4)
    assert {draw for draw, _, _ in one.asked}.isdisjoint(draw for draw, _, _ in other.asked)


def verdicts(sample: Sample) -> Any:
    match sample.group:
        case 0:
            return None
        case 1:
            raise RuntimeError("the judge is out")
        case 2:
            return Outcome.abstained("a tie")
    return float(sample.group == 3)


def test_what_has_no_score_is_left_out_of_the_mean_and_its_record_says_why() -> None:
    found = run(scripted(["1"] * 6), verdicts)
    assert found.scores["greedy"] == {3: 1.0, 4: 0.0, 5: 0.0}
    assert found.held_out()["greedy"]["score"] == 1 / 3
    assert found.held_out()["greedy"]["problems"] == 3
    reasons = {record["group"]: (record["outcome"], record["reason"]) for record in found.records[:3]}
    assert reasons[0][0] == "abstained"
    assert reasons[1] == ("environment_error", "RuntimeError: the judge is out")
    assert reasons[2] == ("abstained", "a tie")


def test_problems_without_a_score_are_counted_by_why() -> None:
    """One of six fails and two abstain, with each decoding: the mean over the other three says so."""
    for scores in run(scripted(["1"] * 6), verdicts).held_out().values():
        assert (scores["problems"], scores["failed"], scores["abstained"]) == (3, 1, 2)
    late = run(scripted(["1"] * 6), lambda sample: Outcome.timed_out("60 s")).held_out()
    assert [scores["failed"] for scores in late.values()] == [6, 6]
    assert run(scripted(["1"] * 6)).held_out()["greedy"]["failed"] == 0


def test_without_any_score_there_is_no_mean() -> None:
    silent = {"score": None, "low": None, "high": None, "problems": 0, "failed": 0, "abstained": 6}
    assert run(scripted(["1"] * 6), lambda sample: None).held_out() == {"greedy": silent, "sampled": silent}


def test_a_decoding_that_nobody_asked_for_is_not_there() -> None:
    assert list(run(scripted(["1"] * 6), lambda sample: None, decodings=("greedy",)).held_out()) == ["greedy"]


def test_too_many_failures_raise_and_quote_the_first_that_failed() -> None:
    """One of six is 17%; the first without a score has abstained, and is not to blame."""
    kept: list[dict[str, Any]] = []
    with pytest.raises(TooManyFailures, match=r"before, step 0, greedy.* 17% .* allows 16%.*: the judge is out\n"):
        run(scripted(["1"] * 6), verdicts, max_failed_fraction=lambda: 0.16, refused=kept.extend)
    assert [record["group"] for record in kept] == [0, 1, 2, 3, 4, 5], "what was played is not lost"
    assert run(scripted(["1"] * 6), verdicts, max_failed_fraction=lambda: 1 / 6).held_out()["greedy"]["failed"] == 1
    assert (
        run(scripted(["1"] * 6), lambda sample: None, max_failed_fraction=lambda: 0.0).held_out()["greedy"]["failed"]
        == 0
    )


def with_scores(scores: dict[int, float]) -> Evaluation:
    return Evaluation({"greedy": scores, "sampled": {}}, ())


def test_the_difference_is_over_problems_that_both_have_a_score_for() -> None:
    """Problems 1 and 2 are in both: +0.5 and -0.25. Pairing by position instead would give other numbers."""
    before, after = with_scores({0: 9.0, 1: 0.25, 2: 0.5}), with_scores({2: 0.25, 1: 0.75, 7: 3.0})
    found = difference(before, after, "greedy")
    assert found == paired_difference([0.25, 0.5], [0.75, 0.25])
    assert found is not None
    assert found.value == 0.125


def test_without_a_common_problem_there_is_no_difference() -> None:
    assert difference(with_scores({0: 1.0}), with_scores({1: 1.0}), "greedy") is None
    assert difference(with_scores({0: 1.0}), with_scores({0: 1.0}), "sampled") is None


scores_of_problems = st.dictionaries(st.integers(0, 20), st.floats(-1e6, 1e6), max_size=8)


@given(before=scores_of_problems, after=scores_of_problems)
@hypothesis_settings(deadline=None, max_examples=50)
def test_a_difference_turned_round_changes_its_sign(before: dict[int, float], after: dict[int, float]) -> None:
    there = difference(with_scores(before), with_scores(after), "greedy")
    back = difference(with_scores(after), with_scores(before), "greedy")
    assert (there is None) == (back is None) == (not before.keys() & after.keys())
    if there is not None and back is not None:
        assert there.value == -back.value
        assert math.isclose(there.low, -back.high, rel_tol=1e-9, abs_tol=1e-9)


def test_an_evaluation_comes_back_from_its_records_through_a_file(tmp_path: Path) -> None:
    """Scores survive JSON, and so do problems without one; other evaluations' records are told apart by `when`."""
    made = run(scripted(["1", "2", "9", "4", "0", "\n"]), verdicts)
    with MetricsLog(tmp_path / "rollouts.jsonl") as log:
        for record in made.records:
            log.append(record)
    again = Evaluation.from_records(read(tmp_path / "rollouts.jsonl"))
    assert again.scores == made.scores
    assert (again.failed, again.abstained) == (made.failed, made.abstained)
    assert list(again.records) == [json.loads(json.dumps(record)) for record in made.records]
    assert again.held_out() == made.held_out()


def test_a_record_says_what_was_asked_answered_and_made_of_it() -> None:
    found = run(scripted(["1"] * 6), problems=1)
    assert found.records[0] == {
        "when": "before",
        "step": 0,
        "group": 0,
        "member": 0,
        "prompt": "0+1=",
        "completion": "1",
        "prompt_tokens": TOKENIZER("0+1=")["input_ids"],
        "completion_tokens": [*TOKENIZER("1", add_special_tokens=False)["input_ids"], EOS],
        "score": 1.0,
        "rewards": {"reward": 1.0},
        "advantage": found.records[0]["advantage"],
        "outcome": "scored",
        "reason": "",
        "stop": "eos",
        "decoding": "greedy",
        "messages": [],
        "row": {"answer": "1"},
    }
    assert [record["decoding"] for record in found.records] == ["greedy", "sampled"]


def test_the_first_failure_is_that_of_a_rollout_that_failed() -> None:
    forest = collect(
        LLMEnv(from_text=False, eos_token_id=EOS), scripted(["1"] * 3), Prompts(ROWS, TOKENIZER).first(3),
        sampling=Sampling(2), seed=0,
    )  # fmt: skip
    assert first_failure(forest) == "no reason given"
    for rollout, outcome in zip(
        forest.rollouts, (Outcome.abstained("a tie"), Outcome.timed_out("60 s"), Outcome.error("x")), strict=True
    ):
        rollout.outcome = outcome
    assert first_failure(forest) == "60 s"
    forest.rollouts[1].outcome = Outcome.error("")
    assert first_failure(forest) == "no reason given"


def test_a_rollout_is_described_only_once_it_is_judged() -> None:
    prompts = Prompts(ROWS, TOKENIZER)
    env = LLMEnv(from_text=False, eos_token_id=EOS)
    forest = collect(env, scripted(["1"]), prompts.first(1), sampling=Sampling(2), seed=0, forest=Forest())
    samples = samples_of(forest, range(1), prompts, TOKENIZER)
    with pytest.raises(ValueError, match="once it has an outcome"):
        rollout_records(forest, samples, when="train", step=1)
    judge_rollouts(forest, samples, range(1), Judge(right))
    assert rollout_records(forest, samples, when="train", step=1)[0]["score"] == 1.0


# ---------------------------------------------------------------- episodes of any task


CALL = '<tool_call>{"name": "double", "arguments": {"number": 3}}</tool_call>'


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


def play_with(
    ask: Callable[[Request], str], ended: Callable[[Sample, Outcome], object], task: Task, members: int = 1
) -> None:
    tokenizer = script_tokenizer()
    starts = [Start(row, group, member, group) for group, row in enumerate(task.train) for member in range(members)]
    rules = Rules(Sampling(200), seed=0)

    def tell(played: Played) -> None:
        assert played.outcome is not None
        ended(played.sample, played.outcome)

    play_episodes(
        task,
        PersonPolicy(ask, tokenizer),
        starts,
        template=ChatTemplate(tokenizer),
        rules=rules,
        judge=Judge(task.score),
        ended=tell,
    )


def test_each_episode_is_told_of_with_its_sample_and_outcome() -> None:
    task = Task("t", ROWS[:3], [], right)
    told: dict[tuple[int, int], tuple[str, float | None]] = {}
    play_with(
        lambda request: "1" if request.draw.member else "2",
        lambda sample, outcome: told.__setitem__((sample.group, sample.member), (sample.completion, outcome.score)),
        task,
        members=2,
    )
    assert told == {
        (0, 0): ("2", 0.0), (0, 1): ("1", 1.0),
        (1, 0): ("2", 1.0), (1, 1): ("1", 0.0),
        (2, 0): ("2", 0.0), (2, 1): ("1", 0.0),
    }  # fmt: skip


def test_what_was_told_before_an_error_is_not_lost() -> None:
    """The first episode is of one turn, and the person leaves in the second turn of the other."""
    rows = [{"prompt": "once", "turns": 1}, {"prompt": "twice", "turns": 2}]

    def reply(episode: Episode) -> str | None:
        return None if episode.turns == episode.row["turns"] else "again"

    told: list[str] = []
    first_was_told = threading.Event()

    def ask(request: Request) -> str:
        if request.draw.turn == 1:
            assert first_was_told.wait(30)
            raise KeyboardInterrupt
        return "yes"

    def ended(sample: Sample, outcome: Outcome) -> None:
        told.append(sample.row["prompt"])
        first_was_told.set()

    task = Task("t", rows, [], lambda sample: 1.0, reply=reply, max_turns=2)
    with pytest.raises(KeyboardInterrupt):
        play_with(ask, ended, task)
    assert told == ["once"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError("out of memory")])
def test_episodes_that_were_under_way_are_no_failed_ones(error: Any) -> None:
    """Many times, for what a row is told and the end of the whole come from two threads."""

    def ask(request: Request) -> str:
        raise error

    told: list[Outcome] = []
    for _ in range(20):
        with pytest.raises(error if isinstance(error, type) else type(error)):
            play_with(ask, lambda sample, outcome: told.append(outcome), Task("t", ROWS[:3], [], right))
    assert told == []


def test_a_record_of_several_turns_holds_the_conversation_with_its_calls_and_all_sampled_tokens(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "double 3"}]
    task = Task(
        "t", [{"prompt": prompt, "answer": "6", "not": {1, 2}}], [],
        lambda sample: {"right": right(sample), "long": 0.5}, tools=[double], max_turns=3,
    )  # fmt: skip
    records: list[dict[str, Any]] = []
    play_with(
        lambda request: "6" if request.draw.turn else CALL,
        lambda sample, outcome: records.append(record_of(sample, outcome, when="eval", step=0)),
        task,
    )
    with MetricsLog(tmp_path / "rollouts.jsonl") as log:
        log.extend(records)
    [record] = read(tmp_path / "rollouts.jsonl")
    assert (record["prompt"], record["completion"], record["stop"]) == (prompt, "6", "eos")
    assert (record["score"], record["rewards"]) == (1.5, {"right": 1.0, "long": 0.5})
    assert (record["row"], record["row_kinds"]) == ({"answer": "6", "not": [1, 2]}, [[["not"], "set"]])
    roles = [message["role"] for message in record["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    [call] = record["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "double", "arguments": {"number": 3}}
    assert record["messages"][2]["content"] == "6"
    said = TOKENIZER(CALL, add_special_tokens=False)["input_ids"]
    assert record["completion_tokens"] == [*said, EOS, *TOKENIZER("6", add_special_tokens=False)["input_ids"], EOS]


def told_record(group: int, score: float | None, outcome: str = "scored", stop: str = "eos") -> dict[str, Any]:
    return {"group": group, "score": score, "outcome": outcome, "stop": stop}


def test_calls_that_are_no_mappings_are_written_as_mappings() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [ToolCall("double", {"number": 3}, "c1")]}
    sample = Sample([message], "6", (1,), (2,), {}, StopReason.EOS, 0, 0, messages=(message,))
    record = record_of(sample, Outcome.scored(1.0), when="eval", step=0)
    plain = {**message, "tool_calls": [{"name": "double", "arguments": {"number": 3}, "id": "c1"}]}
    assert (record["prompt"], record["messages"]) == ([plain], [plain])


TALLIED = [
    told_record(0, 1.0), told_record(0, 0.5), told_record(0, 0.0),
    told_record(1, 1.0), told_record(1, None, "abstained"), told_record(1, None, "timed_out", "timeout"),
    told_record(2, None, "environment_error", "error"),
    told_record(3, 0.0, stop="turn_limit"), told_record(3, 0.0, stop="context_limit"),
]  # fmt: skip


def test_a_tally_by_hand() -> None:
    """Means 0.5, 1 and 0; of 3, 1 and 2 scores 1, 1 and 0 pass; problem 2 has none."""
    found = tally(TALLIED, (1, 2, 3, 4))
    assert found.mean == clustered_mean([[0.5], [1.0], [0.0]])
    assert (found.rollouts, found.problems, found.abstained, found.failed, found.truncated) == (9, 3, 1, 2, 3)
    assert [(each.k, each.problems) for each in found.passed] == [(1, 3), (2, 2), (3, 1), (4, 0)]
    values = [None if each.chance is None else each.chance.value for each in found.passed]
    # pass@1: (1/3 + 1 + 0) / 3; pass@2: (1 - C(2, 2) / C(3, 2) + 0) / 2; pass@3: problem 0 alone.
    assert values == [pytest.approx(4 / 9, abs=1e-15), pytest.approx(1 / 3, abs=1e-15), 1.0, None]


def test_the_score_from_which_a_rollout_passes_can_be_said() -> None:
    assert [tally(TALLIED, (3,), pass_at=at).passed[0].chance for at in (0.5, 1.5)] == [
        Interval(1.0, *wilson(1, 1)),
        Interval(0.0, *wilson(0, 1)),
    ]


def test_a_tally_of_nothing_has_no_numbers() -> None:
    table = tally([told_record(0, None, "abstained")], (1,)).as_table()
    nothing = {"value": None, "low": None, "high": None}
    assert table == {
        "score": nothing,
        "pass_at_k": {"1": {**nothing, "problems": 0}},
        "problems": 0,
        "rollouts": 1,
        "abstained": 1,
        "failed": 0,
        "truncated": 0,
    }


@given(st.permutations(TALLIED))
@hypothesis_settings(deadline=None, max_examples=20)
def test_a_tally_does_not_depend_on_which_episode_ended_first(records: list[dict[str, Any]]) -> None:
    """Up to the order of a sum: 1e-12."""
    found, again = tally(TALLIED, (1, 2)).as_table(), tally(records, (1, 2)).as_table()
    assert again["score"] == pytest.approx(found["score"], abs=1e-12)
    for k in ("1", "2"):
        assert again["pass_at_k"][k] == pytest.approx(found["pass_at_k"][k], abs=1e-12)
