"""Any conversation with a task, in all modes: a batch says what each of its rows says alone, rendered anew."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tests.envs.chat_templates import FORGETS, MARKED, assistant, tokenizer_with, user
from tests.envs.test_chat import HISTORY, MODES, ids, say, shown

from ramet.envs.chat import ChatEnv
from ramet.ragged import rows
from ramet.tasks import Task
from ramet.tasks.task import rng_of
from ramet.types import Episode, OutcomeKind, Sample

TOKENIZERS = {"appends": tokenizer_with(MARKED), "forgets": tokenizer_with(FORGETS)}
DATA = [{"prompt": "1+1?"}, {"prompt": [user("2+2?")]}, {"prompt": [user("a"), assistant("b!c"), user("d")]}]
COUNT, TURNS = 3, 3


def begin(row: Any, rng: Any) -> dict[str, Any]:
    return {"said": [], "first": rng.randrange(100)}


def reply(episode: Episode) -> Any:
    """Tell of everything that an episode has of its own: what another row or another fork left there would show."""
    episode.state["said"].append(episode.text)
    if "x" in episode.text:
        raise KeyError(episode.text)
    if "." in episode.text:
        return None
    told = f"{episode.turns}{episode.state['said']}{episode.state['first']},{episode.rng.randrange(100)}"
    return [user(told), user("and?")] if "!" in episode.text else told


def score(sample: Sample) -> float:
    if sample.completion.startswith("?"):
        raise ValueError(sample.completion)
    return float(len(sample.completion)) + 100 * len(sample.messages) + len(sample.completion_tokens) / 1000


TASK = Task("any", DATA, DATA, score, begin=begin, reply=reply, max_turns=TURNS)


@dataclass
class Alone:
    """One row on its own, in lists: everything is worked out anew whenever it is asked for."""

    index: int
    said: list[str] = field(default_factory=list)
    cut: bool = False

    def then(self, text: str, cut: bool) -> Alone:
        return self if self.ended else replace(self, said=[*self.said, text], cut=cut)

    def play(self) -> tuple[list[Any], str, list[Any], str]:
        """The messages at the end and how it ended ("" if it did not); what the model saw last, and wrote behind it."""
        rng = rng_of(0, self.index)
        prompt = DATA[self.index]["prompt"]
        messages: list[Any] = [user(prompt)] if isinstance(prompt, str) else list(prompt)
        episode = Episode({}, messages, rng, begin({}, rng))
        for turn, text in enumerate(self.said):
            seen = list(messages)
            cut = self.cut and turn == len(self.said) - 1
            if cut and not text:
                return messages, "truncated", seen, ""
            messages.append(assistant(text))
            episode.turns += 1
            if cut:
                return messages, "truncated", seen, text
            try:
                back = reply(episode)
            except KeyError as error:
                return messages, f"reply: KeyError: {error}", seen, text
            if back is None:
                return messages, "terminated", seen, text
            messages.extend([user(back)] if isinstance(back, str) else back)
            if turn + 1 == TURNS:
                return messages, "truncated", seen, text
        return messages, "", messages, ""

    @property
    def ended(self) -> str:
        return self.play()[1]

    def shown(self, mode: str, tokenizer: Any) -> Any:
        """The prompt of the next turn: the whole conversation, written anew."""
        messages, _, seen, text = self.play()
        if mode == "history":
            return messages
        bare = self.index == 0  # text goes on as text
        if bare:
            text = "".join(message["content"] for message in seen) + text
        else:
            text = tokenizer.apply_chat_template(seen, tokenize=False, add_generation_prompt=True) + text
        return [int(tokenizer.bos_token_id)] * bare + ids(text) if mode == "tokens" else text

    def outcome(self, mode: str) -> Any:
        """Kind, score and reason at the end; None before."""
        messages, ended, *_ = self.play()
        if not ended:
            return None
        if ended.startswith("reply"):
            return OutcomeKind.ERROR, None, ended
        taken = self.said[:-1] if self.cut and not self.said[-1] else self.said
        last = taken[-1] if taken else ""
        if last.startswith("?"):
            return OutcomeKind.ERROR, None, f"ValueError: {last}"
        sampled = sum(len(ids(text)) for text in taken) if mode == "tokens" else 0
        return OutcomeKind.SCORED, len(last) + 100 * len(messages) + sampled / 1000, ""


TEXTS = st.lists(st.text("ab!.x?", max_size=3), min_size=COUNT, max_size=COUNT)
FLAGS = st.lists(st.booleans(), min_size=COUNT, max_size=COUNT)
INDICES = st.lists(st.integers(0, len(DATA) - 1), min_size=COUNT, max_size=COUNT)
MOVE = st.one_of(
    st.tuples(st.just("step"), FLAGS, TEXTS, FLAGS),
    st.tuples(st.just("all"), st.just([True] * COUNT), TEXTS, st.just([False] * COUNT)),
    st.tuples(st.just("reset"), FLAGS, INDICES, FLAGS),
    st.tuples(st.just("back"), st.integers(0, 9), st.none(), st.none()),
)


def check(td: Any, plain: list[Alone], mode: str, tokenizer: Any) -> None:
    assert rows(td, HISTORY) == [row.play()[0] for row in plain]
    assert shown(td, mode) == [row.shown(mode, tokenizer) for row in plain]
    found = [one and (one.kind, one.score, one.reason) for one in rows(td, "outcome")]
    assert found == [row.outcome(mode) for row in plain]
    for flag in ("terminated", "truncated", "done"):
        wanted = [
            bool(row.ended)
            if flag == "done"
            else (row.ended == "terminated") == (flag == "terminated") and bool(row.ended)
            for row in plain
        ]
        assert td[flag].flatten().tolist() == wanted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(TOKENIZERS))
@settings(max_examples=25, deadline=None)
@given(first=INDICES, moves=st.lists(MOVE, max_size=7))
def test_any_conversation_of_a_batch_is_that_of_each_row_alone(
    mode: Any, name: str, first: list[int], moves: list[Any]
) -> None:
    """Steps and resets of some rows, turns that a limit cut, failures, and earlier states that are gone on with."""
    tokenizer = TOKENIZERS[name]
    env = ChatEnv(input_mode=mode, tokenizer=tokenizer, task=TASK, score_seconds=None)
    td = env.reset(TensorDict({"prompt_index": torch.tensor(first)}, [COUNT]))
    plain = [Alone(index) for index in first]
    states = [(td, plain)]
    for move, flags, what, cuts in moves:
        if move == "back":
            td, plain = states[flags % len(states)]
            continue
        if move == "reset":
            if not any(flags):
                continue
            given_rows = td.copy().set("prompt_index", torch.tensor(what)).set("_reset", torch.tensor(flags))
            td = env.reset(given_rows)
            plain = [Alone(index) if flag else row for flag, index, row in zip(flags, what, plain, strict=True)]
        else:
            reasons = ["new_token_limit" if cut else None for cut in cuts]
            state = say(td.copy(), mode, what).set("stop_reason", reasons if any(cuts) else ["stop"] * COUNT)
            stepped = env.step(state.set("_step", torch.tensor(flags)))
            rewards = stepped["next", "reward"].flatten().tolist()
            after = [
                row.then(*said) if flag else row for flag, row, *said in zip(flags, plain, what, cuts, strict=True)
            ]
            scores = [
                0.0 if new is old else (new.outcome(mode) or (0, 0))[1] or 0.0
                for new, old in zip(after, plain, strict=True)
            ]
            assert rewards == pytest.approx(scores, abs=1e-3)
            td, plain = env.step_mdp(stepped), after
        check(td, plain, mode, tokenizer)
        states.append((td, plain))
    for td, plain in states:
        check(td, plain, mode, tokenizer)
    env.close()
