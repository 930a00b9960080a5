"""The forest: every distinct prefix once, every rollout its own row."""

from ramet.forest.forest import ROOT, Forest, Rollout, Sampled
from ramet.forest.score import Scores, score

__all__ = ["ROOT", "Forest", "Rollout", "Sampled", "Scores", "score"]
