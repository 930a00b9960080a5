"""What is asked, what is replied, and how an answer is judged: tasks by name, and rewards."""

from ramet.tasks.build import build_task
from ramet.tasks.judge import Judge
from ramet.tasks.judge_model import JudgeModel
from ramet.tasks.processes import in_processes
from ramet.tasks.rescoring import rescore
from ramet.tasks.rewards import format_reward, length_reward, weighted
from ramet.tasks.task import Reward, Task, Verdict

__all__ = [
    "Judge",
    "JudgeModel",
    "Reward",
    "Task",
    "Verdict",
    "build_task",
    "format_reward",
    "in_processes",
    "length_reward",
    "rescore",
    "weighted",
]
