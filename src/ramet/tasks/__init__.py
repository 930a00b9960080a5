"""What is asked, and how an answer is judged: tasks by name, and the judge of their rewards."""

from ramet.tasks.build import build_task
from ramet.tasks.judge import Judge
from ramet.tasks.task import Reward, Task, Verdict

__all__ = ["Judge", "Reward", "Task", "Verdict", "build_task"]
