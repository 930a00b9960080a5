"""Games of textarena: seeded each for itself, blind to each other, and no global random state touched."""

from __future__ import annotations

import asyncio
import random
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

from ramet.checking import StandIn, check_task
from ramet.checking.repeating import seeds
from ramet.cli.asked import task_with
from ramet.config import TaskConfig
from ramet.errors import ConfigError
from ramet.tasks import Judge, Task, build_task
from ramet.tasks.random_states import RandomStates
from ramet.tasks.text_arena import Game, text_arena
from ramet.types import Episode

pytest.importorskip("textarena")

SMALL = {"train_size": 4, "held_out_size": 2}
OFFLINE = [
    "2048-v0",
    "Bandit-v0",
    "Blackjack-v0",
    "Countdown-v0",
    "Crosswords-v0",
    "Cryptarithm-v0",
    "FifteenPuzzle-v0",
    "FrozenLake-v0-random",
    "GuessTheNumber-v0",
    "LightsOut-v0",
    "LogicPuzzle-v0",
    "Mastermind-v0",
    "Minesweeper-v0",
    "PegJump-v0",
    "RushHour-v0",
    "Secretary-v0",
    "Set-v0",
    "Slitherlink-v0",
    "Sokoban-v0",
    "Sudoku-v0-easy",
    "ThreeCardMonte-v0",
    "TowerOfHanoi-v0",
]


def build(game: str, seed: int, **options: Any) -> Task:
    return build_task(f"textarena:{game}", {**SMALL, **options}, seed=seed)


def begun(task: Task, row: Any) -> Game:
    assert task.begin is not None
    game = task.begin(row, random.Random(0))
    assert isinstance(game, Game)
    return game


def secret(game: Game) -> int:
    return int(game._env.game_number)


def test_a_game_is_won_by_its_own_rules() -> None:
    task = build("GuessTheNumber", 0)
    assert task.name == "textarena:GuessTheNumber-v0"
    assert task.max_turns == 20
    game = begun(task, task.train[0])
    wrong = 20 if secret(game) < 20 else 1
    reply = game.move(str(wrong))
    assert reply is not None
    assert ("lower" if wrong == 20 else "higher") in reply
    assert game.move(f"I say [{secret(game)}]") is None
    assert (game.done, game.reward) == (True, 1.0)


def test_an_episode_is_played_and_scored_through_the_task() -> None:
    task = build("GuessTheNumber", 0)

    def knowing(episode: Episode) -> str:
        return f"[{secret(episode.state)}]" if episode.turns else "nonsense"

    with StandIn(task) as stand_in:
        shown = asyncio.run(stand_in.alone(task.held_out[0], knowing))
    assert "invalid move" in shown.messages[2]["content"]
    assert shown.played is not None
    assert not shown.played.stop.truncated
    assert not shown.broken
    assert Judge(task.score)([shown.played.sample])[0].score == 1.0


def test_a_game_that_is_not_finished_earns_nothing_and_two_invalid_moves_end_it() -> None:
    task = build("FrozenLake", 0)
    game = begun(task, task.train[0])
    assert game.reward == 0.0
    assert game.move("nonsense") is not None
    assert game.move("nonsense") is None


def test_what_a_model_wrote_is_not_said_again() -> None:
    task = build("GuessTheNumber", 0)
    game = begun(task, task.train[0])
    reply = game.move("nonsense " * 3)
    assert reply is not None
    assert "nonsense nonsense" not in reply


def test_a_move_that_is_very_long_is_cut() -> None:
    task = build("GuessTheNumber", 0)
    assert "outside the range" in (begun(task, task.train[0]).move("[" + "9" * 100 + "]") or "")
    assert "Invalid move format" in (begun(task, task.train[0]).move("[" + "9" * 20_000 + "]") or "")


@pytest.mark.parametrize("game", ["GuessTheNumber", "Minesweeper-v0-small", "2048-v0-3x3"])
def test_games_are_blind_to_each_other_and_leave_the_global_states_alone(game: str) -> None:
    task = build(game, 0)
    moves = ["[1]", "[2 2]", "[up]", "[3 1]", "[left]", "[0 0]"]
    python, numpy = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr]

    def alone(row: Any) -> list[Any]:
        game = begun(task, row)
        return [game.opening, *(None if game.done else game.move(move) for move in moves), game.reward]

    expected = [alone(row) for row in task.train]
    games = [begun(task, row) for row in task.train]
    found: list[list[Any]] = [[game.opening] for game in games]
    for move in moves:
        for game_, said in zip(games, found, strict=True):
            said.append(None if game_.done else game_.move(move))
            random.Random(0).random()
    for game_, said in zip(games, found, strict=True):
        said.append(game_.reward)
    assert found == expected
    assert len({str(said) for said in expected}) > 1
    assert random.getstate() == python
    assert np.random.get_state()[1].tobytes() == numpy  # type: ignore[union-attr]


@pytest.mark.parametrize("game", OFFLINE)
def test_games_that_need_no_network_can_be_played(game: str) -> None:
    task = text_arena(game, train_size=1, held_out_size=0)
    state = begun(task, task.train[0])
    for move in ("[1]", "nonsense"):
        reply = None if state.done else state.move(move)
        assert reply is None or isinstance(reply, str)
    assert -1.0 <= state.reward <= 1.0


@pytest.mark.parametrize("game", ["GuessTheNumber", "TowerOfHanoi"])
def test_the_task_is_proved(game: str) -> None:
    report = check_task(build(game, 0), episodes=4)
    assert report.passed, str(report)


def test_another_process_deals_out_the_same_games() -> None:
    finding = seeds(partial(task_with, TaskConfig(name="textarena:Crosswords", options=dict(SMALL))), 0)
    assert finding.passed
    assert finding.detail == "the same rows twice and in another process, another seed gives others"


def test_a_game_that_prints_does_not_print_into_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    task = build("LogicPuzzle", 0)
    game = begun(task, task.train[0])
    game.move("nonsense")
    game.move("nonsense")
    out, err = capsys.readouterr()
    assert out == ""
    assert "Correct: 0" in err


def test_forms_and_options_of_the_game() -> None:
    chat, text = build("GuessTheNumber", 0, max_number=3), build("GuessTheNumber", 0, max_number=3, form="text")
    (message,) = chat.train[0]["prompt"]
    assert "between 1 and 3" in message["content"]
    assert text.train[0]["prompt"] == message["content"] + "\n"
    game = begun(text, text.train[0])
    reply = game.move(str(1 + secret(game) % 3))
    assert reply is not None
    assert reply.startswith("\nThe target number is ")
    assert reply.endswith("\n")
    assert build("GuessTheNumber", 0, turns=3).max_turns == 3


def test_held_out_seeds_stay_and_the_seed_chooses_the_others() -> None:
    one, other = build("Mastermind", 0), build("Mastermind", 1)
    assert one.held_out == other.held_out
    assert {row["seed"] for row in one.train}.isdisjoint(row["seed"] for row in (*other.train, *one.held_out))


def test_a_game_that_does_not_repeat_is_told_apart() -> None:
    task = build("GuessTheNumber", 0)
    assert task.begin is not None
    with pytest.raises(RuntimeError, match="does not begin with its seed 5 as it did"):
        task.begin({"prompt": "another one", "seed": 5}, random.Random(0))


@pytest.mark.parametrize(
    ("game", "options", "parts"),
    [
        ("GuessTheNumbr", {}, ['no game "GuessTheNumbr"', "GuessTheNumber"]),
        ("Wordle", {}, ["can not be played here", "LookupError", "nltk.downloader words"]),
        ("TwentyQuestions", {}, ["can not be played here"]),
        ("TicTacToe", {}, ["can not be played here"]),
        ("QuantumTicTacToe", {}, ["for several players"]),
        ("GuessTheNumber", {"largest": 3}, ["TypeError", "largest", "parameters of the game's class"]),
        ("GuessTheNumber", {"form": "prose"}, ["form"]),
        ("GuessTheNumber", {"turns": 0}, ["turns"]),
        ("GuessTheNumber", {"train_size": 0}, ["train_size"]),
    ],
)
def test_what_can_not_be_played_is_refused(
    game: str, options: dict[str, Any], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ConfigError) as caught:
        build_task(f"textarena:{game}", options)
    for part in parts:
        assert part in str(caught.value)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match=r"pip install 'ramet\[tasks\]'"):
        build("GuessTheNumber", 0)


def test_lent_states_go_on_where_they_were_left_even_after_an_error() -> None:
    own, twin = RandomStates(7), random.Random(7)
    before = random.getstate()
    with pytest.raises(KeyError), own.lent():
        _ = {False: 0}[random.random() == twin.random()]
    assert random.getstate() == before
    with own.lent():
        assert random.random() == twin.random()
        assert np.random.rand() == np.random.RandomState(7).rand()
