"""Running a model over a forest: log-probs, entropies and references, each distinct token once."""

from ramet.scoring.adapter import without_adapter
from ramet.scoring.in_file import in_file
from ramet.scoring.score import Scores, score

__all__ = ["Scores", "in_file", "score", "without_adapter"]
