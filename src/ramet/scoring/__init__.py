"""Running a model over a forest: log-probs, entropies and references, each distinct token once."""

from ramet.scoring.adapter import without_adapter
from ramet.scoring.score import Scores, score

__all__ = ["Scores", "score", "without_adapter"]
