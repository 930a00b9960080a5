"""A task of several turns: the environment replies, a tool is called, and each rollout keeps what was seen and written.

Run it: `python examples/06_several_turns.py`. Expected output::

    user: My number is from 1 to 9. Its square?
    assistant: [square(number=3)]<eos>
    tool: 9
    assistant: 9<eos>
    user: Wrong: mine is 7. Once more.
    assistant: 49<eos>
    the reference: 3 turns, score 1.0, ended by eos
    a parrot: 4 turns, score 0.0, ended by turn_limit
    sampled tokens of the two: 24 and 28, of 146 and 224 in all
"""

from __future__ import annotations

from ramet import Judge, Policy, ReferencePolicy, Sampling, ScriptedPolicy, Task
from ramet.chat import ChatTemplate
from ramet.episodes import Rules, Start, into_forest, play_episodes
from ramet.forest import Forest
from ramet.models.tiny import tiny_tokenizer
from ramet.types import Episode, Kind, Sample

ROWS = [{"prompt": [{"role": "user", "content": "My number is from 1 to 9. Its square?"}], "number": 7}]


def square(number: int) -> str:
    """Multiply a number by itself."""
    return str(number * number)


def reply(episode: Episode) -> str | None:
    """Answer a turn in which no tool was called; None is the end."""
    number = episode.row["number"]
    return None if episode.text == str(number**2) else f"Wrong: mine is {number}. Once more."


def score(sample: Sample) -> float:
    """What the model wrote last counts."""
    return float(sample.completion == str(sample.row["number"] ** 2))


def player(episode: Episode) -> str:
    """Guess 3, and work it out with the tool; then do as one is told."""
    turns = ["[square(number=3)]", "9", str(episode.row["number"] ** 2)]
    return turns[episode.turns]


def main() -> None:
    """Let the reference play, and one who repeats itself, and show what came of it."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    task = Task("square", ROWS, [], score, reply=reply, tools=[square], max_turns=4, player=player)
    said = tokenizer("seven.", add_special_tokens=False)["input_ids"]
    parrot = ScriptedPolicy(lambda request: [*said, tokenizer.eos_token_id], eos_token_id=tokenizer.eos_token_id)
    reference = ReferencePolicy(task, tokenizer)
    rules = Rules(Sampling(max_new_tokens=32), seed=0)
    forest, samples = Forest(), []
    players: list[tuple[str, Task, Policy]] = [("the reference", reference.task, reference), ("a parrot", task, parrot)]
    for group, (name, played, policy) in enumerate(players):
        row = reference.row_of(ROWS[0], group=group, member=0) if policy is reference else ROWS[0]
        [episode] = play_episodes(
            played, policy, [Start(row, group)], template=ChatTemplate(tokenizer), rules=rules, judge=Judge(score)
        )
        into_forest([episode], forest)
        if policy is reference:
            print(tokenizer.decode(forest.path(0).tolist()))
        samples.append((name, episode))
    for name, episode in samples:
        assert episode.outcome is not None
        turns = sum(message["role"] == "assistant" for message in episode.sample.messages)
        print(f"{name}: {turns} turns, score {episode.outcome.score}, ended by {episode.stop.value}")
    sampled = [int((rollout.kinds == Kind.SAMPLED).sum()) for rollout in forest.rollouts]
    whole = [len(forest.path(number)) for number in range(len(forest.rollouts))]
    print(f"sampled tokens of the two: {sampled[0]} and {sampled[1]}, of {whole[0]} and {whole[1]} in all")


if __name__ == "__main__":
    main()
