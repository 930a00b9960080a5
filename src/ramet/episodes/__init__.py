"""Episodes of several turns, each on its own: a slow one holds up nobody, and one that fails costs itself."""

from ramet.concurrency import EventLoop, Here
from ramet.episodes.collect import Answers, collect_episodes, play_episodes
from ramet.episodes.gathered import Gathered
from ramet.episodes.pipeline import Pipeline, in_steps
from ramet.episodes.planting import into_forest
from ramet.episodes.play import play
from ramet.episodes.played import Played, Rules, Speech, Start, starts_of
from ramet.tasks.replies import WrongReply

__all__ = [
    "Answers",
    "EventLoop",
    "Gathered",
    "Here",
    "Pipeline",
    "Played",
    "Rules",
    "Speech",
    "Start",
    "WrongReply",
    "collect_episodes",
    "in_steps",
    "into_forest",
    "play",
    "play_episodes",
    "starts_of",
]
