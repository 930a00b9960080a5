"""What is asked, what is replied, and how an answer is judged: tasks by name, rewards, and the proof of a task."""

from ramet.tasks.build import build_task
from ramet.tasks.check import Report, check_task
from ramet.tasks.judge import Judge
from ramet.tasks.judge_model import JudgeModel
from ramet.tasks.rescoring import rescore
from ramet.tasks.rewards import format_reward, length_reward, weighted
from ramet.tasks.task import Reward, Task, Verdict

__all__ = [
    "Judge",
    "JudgeModel",
    "Report",
    "Reward",
    "Task",
    "Verdict",
    "build_task",
    "check_task",
    "format_reward",
    "length_reward",
    "rescore",
    "weighted",
]
