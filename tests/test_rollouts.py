"""Playing episodes: what the policy sampled, what the environment added, and why each row ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ramet import ragged
from ramet.envs.env import EnvBase
from ramet.envs.llm import LLMEnv
from ramet.errors import ForestError
from ramet.forest import Forest
from ramet.policies.policy import Actor, Policy
from ramet.policies.scripted import ScriptedPolicy
from ramet.policies.transformers import TransformersPolicy
from ramet.prompts import Prompts
from ramet.rollouts import collect, judge_rollouts, samples_of
from ramet.scoring import score
from ramet.specs import Composite, Unbounded
from ramet.tasks.judge import Judge
from ramet.types import Completion, Key, Kind, Outcome, Request, Sample, Sampling, StopReason

EOS = 2
P, S, E = Kind.PROMPT, Kind.SAMPLED, Kind.ENVIRONMENT


class Asker(EnvBase):
    """After each response add 20 and the number of the turn; a row is over when its response holds `over`.

    `limit` truncates after so many steps; `rewrite` changes the first token, which no environment may.
    """

    def __init__(self, over: int = 9, *, limit: int | None = None, rewrite: bool = False) -> None:
        super().__init__(batch_locked=False)
        self.over, self.limit, self.rewrite, self.stepped = over, limit, rewrite, list[list[bool]]()
        self.observation_spec = Composite({Key.TOKENS: Unbounded((-1,), dtype=torch.int64)})
        self.action_spec = Composite({Key.RESPONSE: Unbounded((-1,), dtype=torch.int64)})

    def _reset(self, td: TensorDictBase) -> TensorDictBase:
        return TensorDict({"steps": torch.zeros(td.batch_size, dtype=torch.int64)}, td.batch_size)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        steps = td["steps"] + 1
        before, said = ragged.rows(td, Key.TOKENS), ragged.rows(td, Key.RESPONSE)
        over = torch.tensor([self.over in answer.tolist() for answer in said])
        mask = td.get("_step", torch.ones(td.batch_size, dtype=torch.bool))
        self.stepped.append(mask.tolist())
        rows = []
        for row, (prefix, answer) in enumerate(zip(before, said, strict=True)):
            added = [] if over[row] else [20, int(steps[row])]
            rows.append(torch.cat([prefix, answer, torch.tensor(added, dtype=torch.int64)]))
            if self.rewrite:
                rows[-1][0] += 1
        truncated = steps >= self.limit if self.limit is not None else torch.zeros_like(over)
        return TensorDict(
            {
                Key.TOKENS: ragged.Ragged.from_rows(rows).jagged(),
                "steps": steps,
                "terminated": over[:, None],
                "truncated": truncated[:, None],
                "done": (over | truncated)[:, None],
            },
            td.batch_size,
        )


class Recorder(ScriptedPolicy):
    """A scripted policy that remembers what it was asked."""

    def __init__(self, script: Callable[[Request], Sequence[int]]) -> None:
        super().__init__(script, eos_token_id=EOS)
        self.asked: list[list[Request]] = []

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        self.asked.append(list(requests))
        return super().complete(requests)


def start(*prompts: list[int], groups: Sequence[int] | None = None, members: Sequence[int] | None = None) -> TensorDict:
    count = len(prompts)
    return TensorDict(
        {
            Key.TOKENS: ragged.Ragged.from_rows([torch.tensor(prompt) for prompt in prompts]).jagged(),
            Key.GROUP: torch.tensor(groups or list(range(count))),
            Key.MEMBER: torch.tensor(members or [0] * count),
        },
        batch_size=[count],
    )


def by_member(turns: dict[int, list[list[int]]]) -> Callable[[Request], list[int]]:
    """Let each member say its part, turn by turn."""
    return lambda request: turns[request.draw.member][request.draw.turn]


def paths(forest: Forest) -> list[list[int]]:
    return [forest.path(number).tolist() for number in range(len(forest.rollouts))]


def test_one_turn_is_a_prompt_and_a_completion() -> None:
    policy = Recorder(lambda request: [7, EOS] if request.draw.member == 0 else [8, 8, 8, 8])
    policy.version = 5
    td = start([1, 4], [1, 4], [3], groups=[40, 40, 41], members=[0, 1, 0])
    td[Key.PROMPT_INDEX] = torch.tensor([6, 6, 2])
    forest = collect(LLMEnv(from_text=False, eos_token_id=EOS), policy, td, sampling=Sampling(3), seed=11)
    assert paths(forest) == [[1, 4, 7, EOS], [1, 4, 8, 8, 8], [3, 7, EOS]]
    assert [(r.group, r.member, r.prompt_index, r.stop) for r in forest.rollouts] == [
        (40, 0, 6, StopReason.EOS),
        (40, 1, 6, StopReason.NEW_TOKENS),
        (41, 0, 2, StopReason.EOS),
    ]
    assert [r.kinds.tolist() for r in forest.rollouts] == [[P, P, S, S], [P, P, S, S, S], [P, S, S]]
    assert forest.rollouts[0].versions.tolist() == [-1, -1, 5, 5]
    [asked] = policy.asked
    assert [(r.draw.seed, r.draw.prompt, r.draw.member, r.draw.turn) for r in asked] == [
        (11, 40, 0, 0),
        (11, 40, 1, 0),
        (11, 41, 0, 0),
    ]
    assert [request.tokens.tolist() for request in asked] == [[1, 4], [1, 4], [3]]


def test_one_turn_ends_as_its_completion_did_though_the_environment_knows_no_eos() -> None:
    forest = collect(
        LLMEnv(from_text=False, eos_token_id=-1), Recorder(lambda r: [EOS]), start([1]), sampling=Sampling(3), seed=0
    )
    assert forest.rollouts[0].stop is StopReason.EOS


def test_what_the_environment_adds_is_the_environments_and_is_seen_next() -> None:
    says = {0: [[7], [5, 9], []], 1: [[8, 8], [8], [8]], 2: [[9], [], []]}
    policy, env = Recorder(by_member(says)), Asker()
    forest = collect(
        env, policy, start([1, 1], [3], [4, 4, 4], members=[0, 1, 2]), sampling=Sampling(4), seed=0, max_turns=3
    )
    assert paths(forest) == [[1, 1, 7, 20, 1, 5, 9], [3, 8, 8, 20, 1, 8, 20, 2, 8, 20, 3], [4, 4, 4, 9]]
    assert [r.kinds.tolist() for r in forest.rollouts] == [
        [P, P, S, E, E, S, S],
        [P, S, S, E, E, S, E, E, S, E, E],
        [P, P, P, S],
    ]
    flat = forest.sampled([0, 1, 2])
    assert forest.tokens[flat.index].tolist() == [7, 5, 9, 8, 8, 8, 8, 9]
    assert flat.lengths.tolist() == [3] * 3 + [4] * 4 + [1]
    assert not flat.log_probs.isnan().any()
    assert [r.stop for r in forest.rollouts] == [StopReason.STOP, StopReason.TURNS, StopReason.STOP]
    # Rows that ended are neither asked nor stepped; each turn sees all that came before.
    assert [[r.draw.member for r in asked] for asked in policy.asked] == [[0, 1, 2], [0, 1], [1]]
    assert [[r.row for r in asked] for asked in policy.asked] == [[0, 1, 2], [0, 1], [0]]
    assert [r.draw.turn for asked in policy.asked for r in asked] == [0, 0, 0, 1, 1, 2]
    assert [r.tokens.tolist() for r in policy.asked[1]] == [[1, 1, 7, 20, 1], [3, 8, 8, 20, 1]]
    assert env.stepped == [[True] * 3, [True, True, False], [False, True, False]]


def test_a_completion_that_a_limit_cut_ends_its_row() -> None:
    says = {0: [[7, 7, 7], []], 1: [[7], [9]]}
    policy = Recorder(by_member(says))
    forest = collect(Asker(), policy, start([1], [1], members=[0, 1]), sampling=Sampling(2), seed=0, max_turns=2)
    assert [r.stop for r in forest.rollouts] == [StopReason.NEW_TOKENS, StopReason.STOP]
    assert [len(asked) for asked in policy.asked] == [2, 1]


@pytest.mark.parametrize("max_turns", [1, 2, 5])
def test_a_truncating_environment_is_a_turn_limit_and_no_end(max_turns: int) -> None:
    forest = collect(
        Asker(limit=1), Recorder(lambda r: [7, EOS]), start([1]), sampling=Sampling(4), seed=0, max_turns=max_turns
    )
    assert forest.rollouts[0].stop is StopReason.TURNS
    ended = collect(Asker(limit=1), Recorder(lambda r: [9, EOS]), start([1]), sampling=Sampling(4), seed=0, max_turns=5)
    assert ended.rollouts[0].stop is StopReason.EOS  # terminated in its last step: an end


def test_turns_of_a_plain_environment_are_only_sampled_tokens() -> None:
    """LLMEnv adds nothing of its own; an eos ends a row, another end of a turn does not."""
    says = {0: [[7], [8], [EOS]], 1: [[7], [EOS], []], 2: [[7], [7], [7]]}
    policy = Recorder(by_member(says))
    forest = collect(
        LLMEnv(from_text=False, eos_token_id=EOS),
        policy,
        start([1, 5], [1], [3], members=[0, 1, 2]),
        sampling=Sampling(4),
        seed=0,
        max_turns=3,
    )
    assert paths(forest) == [[1, 5, 7, 8, EOS], [1, 7, EOS], [3, 7, 7, 7]]
    assert [r.stop for r in forest.rollouts] == [StopReason.EOS, StopReason.EOS, StopReason.TURNS]
    assert [r.kinds.tolist() for r in forest.rollouts] == [[P, P, S, S, S], [P, S, S], [P, S, S, S]]


class Failing(Policy):
    """Say one token; member 1 stops with an error, member 2 in a prompt that does not fit."""

    def complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        for request in requests:
            stop = {1: StopReason.ERROR, 2: StopReason.PROMPT_TOO_LONG}.get(request.draw.member, StopReason.EOS)
            tokens = torch.zeros(int(stop is StopReason.EOS), dtype=torch.int64)
            yield Completion(request.row, tokens, torch.zeros(len(tokens)), stop, 0)


def test_an_answer_that_failed_ends_its_row_alone() -> None:
    forest = collect(
        Asker(), Failing(), start([1], [1], [1], members=[0, 1, 2]), sampling=Sampling(2), seed=0, max_turns=2
    )
    assert [r.stop for r in forest.rollouts] == [StopReason.TURNS, StopReason.ERROR, StopReason.PROMPT_TOO_LONG]
    assert [len(forest.sampled([n]).index) for n in range(3)] == [2, 0, 0]


def test_equal_prompts_of_two_groups_stay_two_groups_and_one_path() -> None:
    td = start([1, 5], [1, 5], groups=[3, 8])
    forest = collect(
        LLMEnv(from_text=False, eos_token_id=EOS), Recorder(lambda r: [EOS]), td, sampling=Sampling(2), seed=0
    )
    assert [r.group for r in forest.rollouts] == [3, 8]
    assert forest.tokens.tolist() == [1, 5, EOS]


def test_episodes_grow_the_forest_that_is_given() -> None:
    env, policy = LLMEnv(from_text=False, eos_token_id=EOS), Recorder(lambda r: [7, EOS])
    forest = collect(env, policy, start([1]), sampling=Sampling(2), seed=0)
    again = collect(env, policy, start([1], groups=[5]), sampling=Sampling(2), seed=1, forest=forest)
    assert again is forest
    assert paths(forest) == [[1, 7, EOS]] * 2
    assert [r.group for r in forest.rollouts] == [0, 5]
    assert forest.tokens.tolist() == [1, 7, EOS]


def test_left_padded_prompts_are_read_by_their_mask() -> None:
    """0 is a token here, and stands in a prompt; only the mask tells it from padding."""
    td = start([1], [1], members=[0, 1])
    td[Key.TOKENS] = torch.tensor([[0, 0, 5], [0, 6, 7]])
    td[Key.MASK] = torch.tensor([[False, True, True], [True, True, True]])
    says = {0: [[7, 7], [EOS]], 1: [[], [EOS]]}
    forest = collect(
        LLMEnv(from_text=False, eos_token_id=EOS),
        Recorder(by_member(says)),
        td,
        sampling=Sampling(3),
        seed=0,
        max_turns=2,
    )
    assert paths(forest) == [[0, 5, 7, 7, EOS], [0, 6, 7, EOS]]


def test_what_was_given_is_not_changed() -> None:
    td = start([1, 5], [3])
    before = [row.tolist() for row in ragged.rows(td, Key.TOKENS)], sorted(td.keys())
    collect(Asker(), Recorder(lambda r: [7]), td, sampling=Sampling(2), seed=0, max_turns=2)
    assert ([row.tolist() for row in ragged.rows(td, Key.TOKENS)], sorted(td.keys())) == before


def test_an_environment_that_rewrites_history_is_found_out() -> None:
    with pytest.raises(ForestError, match="row 0: the environment gave back"):
        collect(Asker(rewrite=True), Recorder(lambda r: [7]), start([1, 5]), sampling=Sampling(2), seed=0)


def test_there_is_at_least_one_turn() -> None:
    with pytest.raises(ValueError, match="max_turns"):
        collect(Asker(), Recorder(lambda r: [7]), start([1]), sampling=Sampling(2), seed=0, max_turns=0)


@pytest.mark.parametrize("cut", [{}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.1}])
def test_a_models_turns_score_as_they_were_sampled(cut: dict[str, Any], tiny: Callable[..., PreTrainedModel]) -> None:
    """Two turns with environment tokens between them, temperature 0.7; within 1e-5, float32."""
    sampling = Sampling(5, 0.7, stop_ids=tuple(range(15)), **cut)
    model = tiny("absolute", torch.float32)
    policy = TransformersPolicy(model, eos_ids=[])
    forest = collect(
        Asker(over=99),
        policy,
        start([1, 5], [1, 5], [7], groups=[0, 0, 1], members=[0, 1, 0]),
        sampling=sampling,
        seed=0,
        max_turns=3,
    )
    flat = forest.sampled([0, 1, 2])
    assert max(int((r.kinds == E).sum()) for r in forest.rollouts) > 2  # some row had several turns
    with torch.no_grad():
        found = score(model, forest, temperature=0.7, support=sampling.support).log_probs[flat.index]
    torch.testing.assert_close(found, flat.log_probs, rtol=1e-5, atol=1e-5)


def test_an_actor_plays_whole_rollouts_of_tensordicts() -> None:
    """The policy as a function of TensorDicts: the tokens are those of `collect`, with nothing after the end."""
    says = {0: [[7], [8, EOS]], 1: [[EOS]], 2: [[7, 7], [7], [EOS]]}
    td = start([1, 5], [1], [3], members=[0, 1, 2])
    env = LLMEnv(from_text=False, eos_token_id=EOS)
    policy = Recorder(by_member(says))
    played = env.rollout(
        5, Actor(policy, Sampling(4)), break_when_all_done=True, break_when_any_done=False, tensordict=td
    )
    last = ragged.rows(played[:, -1]["next"], Key.TOKENS)
    forest = collect(env, Recorder(by_member(says)), td, sampling=Sampling(4), seed=0, max_turns=5)
    assert [row.tolist() for row in last] == paths(forest) == [[1, 5, 7, 8, EOS], [1, EOS], [3, 7, 7, 7, EOS]]
    assert [[r.draw.member for r in asked] for asked in policy.asked] == [[0, 1, 2], [0, 2], [2]]


# ---------------------------------------------------------------- samples and outcomes


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<bos>", "<eos>", "two", "plus", "is", "four", "five"]
    inner = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>")


@pytest.fixture
def played(tokenizer: PreTrainedTokenizerFast) -> tuple[Forest, Prompts]:
    prompts = Prompts([{"prompt": "two plus two is", "answer": "four"}, {"prompt": "is", "answer": "five"}], tokenizer)
    script = {(0, 0): [6, EOS], (0, 1): [7, 7, 7], (1, 0): [EOS], (1, 1): [7, EOS]}
    policy = ScriptedPolicy(lambda r: script[r.draw.prompt, r.draw.member], eos_token_id=EOS)
    env = LLMEnv(from_text=False, eos_token_id=EOS)
    return collect(env, policy, prompts.first(2, group_size=2), sampling=Sampling(3), seed=0), prompts


def test_a_sample_is_what_was_asked_and_said(
    played: tuple[Forest, Prompts], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Ids as they were sampled; text without special tokens, though eos is the pad token; in the order asked for."""
    forest, prompts = played
    samples = samples_of(forest, [3, 0, 1, 2], prompts, tokenizer)
    assert [sample.completion for sample in samples] == ["five", "four", "five five five", ""]
    assert [sample.completion_tokens for sample in samples] == [(7, EOS), (6, EOS), (7, 7, 7), (EOS,)]
    assert samples[1].prompt_tokens == (3, 4, 3, 5)
    assert [sample.prompt for sample in samples] == ["is", "two plus two is", "two plus two is", "is"]
    assert [sample.row["answer"] for sample in samples] == ["five", "four", "four", "five"]
    assert [(sample.group, sample.member) for sample in samples] == [(1, 1), (0, 0), (0, 1), (1, 0)]
    assert [sample.stop for sample in samples] == [
        StopReason.EOS,
        StopReason.EOS,
        StopReason.NEW_TOKENS,
        StopReason.EOS,
    ]


def test_outcomes_go_to_their_own_rollouts(played: tuple[Forest, Prompts], tokenizer: PreTrainedTokenizerFast) -> None:
    forest, prompts = played
    verdicts = {"four": 1.0, "five five five": None, "": Outcome.error("broke"), "five": Outcome.timed_out("slow")}
    order = [3, 1, 0, 2]
    judge = Judge(lambda sample: verdicts[sample.completion])
    assert judge_rollouts(forest, samples_of(forest, order, prompts, tokenizer), order, judge) == 0.5
    assert [r.outcome.kind.value if r.outcome else None for r in forest.rollouts] == [
        "scored",
        "abstained",
        "environment_error",
        "timed_out",
    ]
    assert judge_rollouts(forest, [], [], judge) == 0.0


def test_a_rollout_that_its_policy_failed_to_complete_is_an_error_and_is_not_judged(
    played: tuple[Forest, Prompts], tokenizer: PreTrainedTokenizerFast
) -> None:
    forest, prompts = played
    before = forest.rollouts[1].stop
    forest.rollouts[1].stop = StopReason.ERROR
    asked: list[str] = []

    def judging(sample: Sample) -> float:
        asked.append(sample.completion)
        return 1.0

    order = [0, 1, 2]
    assert judge_rollouts(forest, samples_of(forest, order, prompts, tokenizer), order, Judge(judging)) == 1 / 3
    kinds = [rollout.outcome.kind.value if rollout.outcome else None for rollout in forest.rollouts[:3]]
    assert kinds == ["scored", "environment_error", "scored"]
    assert len(asked) == 2
    forest.rollouts[1].stop = before


def test_a_rollout_that_has_not_ended_or_has_no_data_row_is_refused(
    played: tuple[Forest, Prompts], tokenizer: PreTrainedTokenizerFast
) -> None:
    forest, prompts = played
    forest.rollouts[1].stop = None
    with pytest.raises(ValueError, match="rollout 1 has not ended"):
        samples_of(forest, [0, 1], prompts, tokenizer)
    forest.rollouts[0].prompt_index = -1
    with pytest.raises(ValueError, match="prompt_index -1"):
        samples_of(forest, [0], prompts, tokenizer)
