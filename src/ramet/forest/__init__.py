"""The forest: every distinct prefix once, every rollout its own row."""

from ramet.forest.forest import ROOT, Forest, MCTSForest, Rollout, Sampled
from ramet.forest.hashing import SipHash
from ramet.forest.tree import Tree

__all__ = ["ROOT", "Forest", "MCTSForest", "Rollout", "Sampled", "SipHash", "Tree"]
