"""The games for one player of the package textarena."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ramet.errors import ConfigError
from ramet.tasks.options import one_of, whole
from ramet.tasks.random_states import RandomStates
from ramet.tasks.task import Row, Task
from ramet.types import Episode, Prompt, Sample

NAME = "textarena"
LONGEST = 2000  # characters of a move: of a longer one the game sees the first
UNLIMITED = 100  # turns of a game that sets no limit of its own


def text_arena(
    game: str,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    turns: int | None = None,
    form: str = "chat",
    train_size: int = 200,
    held_out_size: int = 50,
) -> Task:
    """Make a task of a game for one player of the package textarena; `options` are the game's own.

    `game` is its id, such as "GuessTheNumber-v0"; without a version it is "-v0". The prompt is what the game says
    first, and each reply what it says after a move; a move without brackets is put into brackets where the game does
    so. The reward is the game's own, mostly from 0 to 1, and -1 for a second invalid move in a row; a game that was not
    finished earns 0. `turns` are how many the model may take: by default twice what the game allows, for an invalid
    move does not count there, or 100 where it allows any number. Of a move of more than 2,000 characters the game sees
    the first.

    The form "chat" is messages, "text" writes them one behind the other with line breaks between. Each row has "prompt"
    and "seed", with which its game begins; held-out seeds are always the same ones, `seed` chooses those that are
    trained on. A game draws from the global random states of Python and numpy: it is lent its own, one for each
    episode, and the global ones stay as they are.

    Raises `ConfigError` without the package, and for a game that is unknown, is for several players, or can not be
    played here: some need word lists of nltk, a judge behind a network, or a newer Python.
    """
    whole("train_size", train_size, low=1)
    whole("held_out_size", held_out_size, low=0)
    chat = one_of("form", form, ("text", "chat")) == "chat"
    if turns is not None:
        whole("turns", turns, low=1)
    arena = _Arena(_id(game), dict(options or {}), chat)

    def rows(stream: str, count: int, taken: set[int]) -> list[dict[str, Any]]:
        rng = random.Random(f"{NAME}: {arena.game}: {stream}")
        made: list[dict[str, Any]] = []
        while len(made) < count:
            number = rng.getrandbits(31)
            if number not in taken:
                taken.add(number)
                begun = arena.play(number)
                limits.append(begun.limit)
                made.append({"prompt": begun.opening, "seed": number})
        return made

    taken: set[int] = set()
    limits: list[int | None] = []
    held_out = rows("held out", held_out_size, taken)
    train = rows(f"train {seed}", train_size, taken)
    limit = limits[0]
    return Task(
        f"{NAME}:{arena.game}",
        train,
        held_out,
        score,
        begin=arena.begin,
        reply=reply,
        max_turns=turns if turns is not None else UNLIMITED if limit is None else 2 * limit,
    )


class Game:
    """One game that is being played, with random states of its own."""

    def __init__(self, env: Any, states: RandomStates, chat: bool) -> None:
        self._env = env
        self._states = states
        self._chat = chat
        self.done = False
        said = self._heard()
        self.opening: Prompt = [{"role": "user", "content": said}] if chat else f"{said}\n"

    @property
    def limit(self) -> int | None:
        """How many turns the game allows."""
        limit = self._env.state.max_turns
        return None if limit is None else int(limit)

    @property
    def reward(self) -> float:
        """What the game gives, 0 while it goes on."""
        rewards = self._env.state.rewards
        if rewards is None:
            return 0.0
        reward = rewards[0]
        # A few games write down the reason of an invalid move where the reward belongs.
        return float(reward) if isinstance(reward, (int, float)) else -1.0

    def move(self, text: str) -> str | None:
        """Make a move; return what the game says to it, or None at its end."""
        with self._states.lent(), _no_prints():
            self.done, _ = self._env.step(text[:LONGEST])
        if self.done:
            return None
        said = self._heard()
        return said if self._chat else f"\n{said}\n"

    def _heard(self) -> str:
        own = _package().ObservationType.PLAYER_ACTION  # which a few games write down askew, as no text
        said = self._env.state.get_current_player_observation()
        return "\n".join(text for _, text, kind in said if kind != own and isinstance(text, str)).strip()


@dataclass(frozen=True, slots=True)
class _Arena:
    game: str
    options: Mapping[str, Any]
    chat: bool

    def begin(self, row: Row, rng: random.Random) -> Game:
        """Begin the game of a row, and see to it that it says what the prompt says."""
        game = self.play(int(row["seed"]))
        if game.opening != row["prompt"]:
            raise RuntimeError(
                f"{NAME}:{self.game} does not begin with its seed {row['seed']} as it did when its rows were made: the "
                "game depends on more than that"
            )
        return game

    def play(self, seed: int) -> Game:
        """Begin a game with a seed."""
        package, states = _package(), RandomStates(seed)
        try:
            with states.lent(), _no_prints():
                env = package.make(self.game, **self.options)
                env.reset(num_players=1, seed=seed)
        except Exception as error:  # games check in any way, or not at all
            said = next((line for line in str(error).splitlines() if line.strip(" *")), "")
            raise ConfigError(
                f"{NAME}:{self.game} can not be played here: {type(error).__name__}: {said.strip()}",
                hint=_hint(error, said),
            ) from error
        if not isinstance(env.state, package.SinglePlayerState):
            raise ConfigError(
                f"{NAME}:{self.game} is a game for several players", hint="choose one for a single player"
            )
        return Game(env, states, self.chat)


def _no_prints() -> contextlib.AbstractContextManager[object]:
    """Send what a game prints, as a few do, to where logs go: the output is for data."""
    return contextlib.redirect_stdout(sys.stderr)


def reply(episode: Episode) -> str | None:
    """Make the model's move in the episode's game."""
    game: Game = episode.state
    return game.move(episode.text)


def score(sample: Sample) -> float:
    """Return what the game gave."""
    game: Game = sample.state
    return game.reward


def _hint(error: Exception, said: str) -> str:
    if isinstance(error, LookupError) and "Resource" in said:
        return "it needs word lists: python -m nltk.downloader words averaged_perceptron_tagger_eng"
    if isinstance(error, SyntaxError):
        return "this game is written for a newer Python"
    if isinstance(error, TypeError):
        return "its options are the parameters of the game's class"
    return "choose another game, or give it what it needs"


def _id(game: str) -> str:
    _package()
    known = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    for name in (game, f"{game}-v0"):
        if name in known:
            return name
    near = difflib.get_close_matches(game, [name for name in known if not name.endswith(("-raw", "-train"))], n=3)
    raise ConfigError(
        f'textarena has no game "{game}"', hint=f"did you mean {' or '.join(near)}?" if near else "see textarena.envs"
    )


def _package() -> ModuleType:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the package's own text, where it is compiled for the first time
            return importlib.import_module("textarena")
    except ImportError as error:
        raise ConfigError(
            "tasks called textarena:GAME need the package textarena", hint="pip install 'ramet[tasks]'"
        ) from error
