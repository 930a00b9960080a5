"""The data model: every distinct prefix is stored once, every rollout keeps its own row.

Two tables (tables.py): *nodes*, of which equal prefixes are one, and *rollouts*, which are never merged: eight
identical completions are one path and eight rollouts with eight rewards. A forest grows in two ways: `plant` and `grow`
take tokens, `extend` takes rollouts of an environment. It is read as tables, as trees (tree.py), and as arrays
(columns.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest.columns import fill, to_arrays
from ramet.forest.content import same
from ramet.forest.entries import KeyPath
from ramet.forest.extend import Episode, Keys, read_episodes
from ramet.forest.files import load_file, save_file
from ramet.forest.hashing import PrefixHash
from ramet.forest.nodes import ROOT
from ramet.forest.prefixes import read_root
from ramet.forest.replay import replay, steps_from_segments
from ramet.forest.rollout import Rollout, Sampled
from ramet.forest.tables import Tables
from ramet.forest.tree import Decode, Tree, TreePath
from ramet.forest.visits import Counts
from ramet.types import Key

__all__ = ["ROOT", "Forest", "MCTSForest", "Rollout", "Sampled"]


class Forest(Tables):
    """Rollouts over shared prefixes.

    `hashing` maps int64 [N, 2] (hash of a prefix, next token) to int64 [N]: the default is a keyed SipHash. A hash only
    finds a node; the stored tokens decide, so a weak hash costs time and never an answer.

    >>> from ramet.types import Kind
    >>> forest = Forest()
    >>> a, b = forest.plant([torch.tensor([5, 6])] * 2, groups=[0, 0], members=[0, 1])
    >>> forest.grow([a, b], [torch.tensor([7]), torch.tensor([7, 8])], Kind.SAMPLED,
    ...             log_probs=[torch.tensor([-0.5]), torch.tensor([-0.5, -1.0])], versions=[0, 0])
    >>> forest.node_count, forest.tokens.tolist()          # the prompt once, the shared 7 once
    (4, [5, 6, 7, 8])
    >>> [forest.path(r).tolist() for r in (a, b)]
    [[5, 6, 7], [5, 6, 7, 8]]

    Or from what environments return:

    >>> from tensordict import TensorDict
    >>> step = TensorDict({"tokens": torch.tensor([[5, 6]] * 2), "tokens_response": torch.tensor([[7], [9]]), "next": {
    ...     "tokens": torch.tensor([[5, 6, 7], [5, 6, 9]]), "reward": torch.tensor([[1.0], [0.0]])}}, [2])
    >>> forest.extend(step)
    [2, 3]
    >>> tree = forest.get_tree(torch.tensor([5, 6]))
    >>> print(tree.to_string())
    () [5, 6]  visits 4  value 0.5
      (0,) [7]  visits 3  value 1  prior 0.607
        (0, 0) [8]  visits 1  prior 0.368
      (1,) [9]  visits 1  value 0
    >>> list(tree.valid_paths())
    [(0,), (0, 0), (1,)]
    >>> tree.rollout_from_path((1,))["next", "tokens"].tolist()
    [[5, 6, 9]]
    """

    def __init__(self, hashing: PrefixHash | None = None) -> None:
        super().__init__(hashing)
        self._counted: Counts | None = None

    def extend(
        self,
        rollout: TensorDictBase,
        *,
        observation_key: KeyPath | None = None,
        action_key: KeyPath | None = None,
        mask_key: KeyPath | None = None,
        reward_key: KeyPath = Key.REWARD,
        log_prob_key: KeyPath | None = None,
        version_key: KeyPath = "policy_version",
        time: bool | None = None,
    ) -> list[int]:
        """Take a rollout [*B, T] or [T] of an environment, or one step [*B] of it; return the rollouts' numbers.

        A row is a rollout up to where it is done, and another one from where it was reset. What is observed is found
        under "tokens" (its mask beside it, in any layout), "observation" or "text", and what was written under
        "tokens_response", "action" or "text_response"; other names go into the arguments. In a forest of texts the
        tokens are characters. Where one rollout begins inside the path of another, it is a second rollout.

        Its first observation is a rollout's prompt, its actions are sampled, what comes back behind them is the
        environment's. Log-probs are taken from "log_probs" or "sample_log_prob", one for each token of the action, and
        are NaN without. `Rollout.steps` keeps every other tensor of the steps; text beside tokens is derived from them
        and not kept. There is a node where a prompt ends, after each turn, where rollouts part, and where they end;
        steps of one token are no turns.

        A TensorDict of one dimension is a rollout [T] where an element observes what the one before came back with,
        else a step [B]; `time` says it. Raises `ForestError` or `RewardError`, and changes nothing, where a step does
        not go on from the one before it, or entries do not fit.
        """
        keys = Keys(observation_key, action_key, mask_key, reward_key, log_prob_key, version_key)
        episodes = read_episodes(rollout, keys, time)
        if not episodes:
            return []
        unit = episodes[0].steps.form.unit
        self._check_unit(unit)
        hashes = self._hashes_of(episodes)
        fresh = []
        for episode, row in zip(episodes, hashes, strict=True):
            grown = Rollout(
                episode.group,
                episode.member,
                episode.prompt_index,
                stop=episode.stop,
                outcome=episode.outcome,
                steps=episode.steps,
            )
            self._walk(grown, episode.tokens, row, episode.segments, episode.kinds, episode.log_probs, episode.versions)
            fresh.append(grown)
        return self._add(fresh, unit)

    def _hashes_of(self, episodes: list[Episode]) -> list[list[int]]:
        rows, claims = [e.tokens for e in episodes], [e.claims for e in episodes if e.claims is not None]
        if len(claims) == len(rows):
            proven = self.nodes.proven_hashes(rows, [e.segments[0] for e in episodes], claims)
            if proven is not None:
                return proven
        return self.nodes.hash_rows([self.nodes.initial] * len(rows), rows)

    # ---------------------------------------------------------------- what rollouts say of nodes

    @property
    def visits(self) -> Tensor:
        """How many rollouts pass each node or end there, int64 [N]."""
        return torch.from_numpy(self._counts().visits)

    @property
    def values(self) -> Tensor:
        """The mean return of the rollouts that pass each node, float64 [N]; NaN where none has one.

        The return of a rollout is the score of its outcome where it was judged (then one without a score is left out),
        else the sum of the rewards of its steps.
        """
        return torch.from_numpy(self._counts().values)

    @property
    def priors(self) -> Tensor:
        """The probability that the sampler gave the segment of each node after its parent, float64 [N].

        Rollouts may have been sampled with different log-probs: it is the mean of their probabilities. A rollout counts
        where the segment lies behind its prompt and each sampled token in it has a log-prob; NaN where none counts.
        """
        return torch.from_numpy(self._counts().priors)

    def _counts(self) -> Counts:
        if self._counted is None:
            self._counted = Counts(self.nodes, self.rollouts)
        self._counted.update(self._went_on)
        self._went_on.clear()
        return self._counted

    # ---------------------------------------------------------------- trees

    def get_tree(self, root: int | str | Tensor | TensorDictBase | None = None) -> Tree:
        """Return the part of the forest that begins with a prefix; all of it without.

        `root` is the number of a node, a prefix (int64 [L], or a string in a forest of texts), or a TensorDict that
        holds one, as the first step of a rollout does. A prefix may end inside a segment. Raises `ForestError` where
        no rollout begins with it.
        """
        if root is None or isinstance(root, int):
            node = ROOT if root is None else root
            self._check_node(node)
            return Tree(self, node, self.depth(node))
        prefix = read_root(root, "tokens" if self.unit is None else self.unit)
        node, fitted = self.nodes.locate(prefix)
        if fitted < len(prefix):
            raise ForestError(
                f"no rollout begins with these {len(prefix)} tokens: one begins with the first {fitted}, and then "
                f"another token comes than {int(prefix[fitted])}",
                hint="extend the forest by a rollout from there first",
            )
        return Tree(self, node, fitted)

    def valid_paths(self, root: int | str | Tensor | TensorDictBase | None = None) -> Iterator[TreePath]:
        """Yield the path to every place below `root` where a rollout ends: see `Tree`."""
        return self.get_tree(root).valid_paths()

    def rollout_from_path(
        self, path: Sequence[int], root: int | str | Tensor | TensorDictBase | None = None, *, which: int = 0
    ) -> TensorDictBase:
        """Give back a rollout that takes `path` from `root` on: see `Tree.rollout_from_path`."""
        return self.get_tree(root).rollout_from_path(path, which=which)

    def leaves(self, root: int | str | Tensor | TensorDictBase | None = None) -> list[int]:
        """Return the numbers of the nodes below `root` that have no children."""
        return self.get_tree(root).leaves()

    def to_string(
        self,
        root: int | str | Tensor | TensorDictBase | None = None,
        node_format_fn: Callable[[Tree], object] | None = None,
        *,
        decode: Decode | None = None,
    ) -> str:
        """Draw what is below `root` as text: see `Tree.to_string`."""
        return self.get_tree(root).to_string(node_format_fn, decode=decode)

    def plot(self, root: int | str | Tensor | TensorDictBase | None = None, *, decode: Decode | None = None) -> Any:
        """Draw what is below `root` with plotly, and return the figure: see `Tree.plot`."""
        return self.get_tree(root).plot(decode=decode)

    def rollout(self, number: int, *, above: int = 0, below: int | None = None) -> TensorDictBase:
        """Give back one rollout as a lazy stack [T] of its steps, with the keys that it came with.

        Of a rollout that was planted and grown, each run of sampled tokens is a step. `above` and `below` leave out the
        steps that lie in the first `above` tokens of the path, or behind the first `below`. Raises `ForestError` where
        no step is left.
        """
        self._check_numbers("rollout", [number])
        rollout = self.rollouts[number]
        steps = steps_from_segments(number, rollout) if rollout.steps is None else rollout.steps
        wanted = (steps.starts >= above) | (steps.ends > above)
        if below is not None:
            wanted &= (steps.starts < below) | (steps.ends <= below)
        found = np.flatnonzero(wanted)
        if not found.size:
            raise ForestError(f"rollout {number} has no step between its first {above} tokens and its first {below}")
        return replay(self.path(number).numpy(), steps, int(found[0]), int(found[-1]) + 1)

    def rollouts_through(self, node: int) -> list[int]:
        """Return the numbers of the rollouts that pass a node or end there."""
        self._check_node(node)
        return self._counts().through(node)

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self.node_count:
            raise ForestError(f"no node {node}: the forest has {self.node_count}, counted from 0")

    # ---------------------------------------------------------------- columns

    def subset(self, rollouts: Sequence[int]) -> Forest:
        """Return a forest of some rollouts, in the order given, and of no tokens but theirs."""
        self._check_numbers("subset", rollouts)
        if len(set(rollouts)) != len(rollouts):
            raise ForestError(f"subset: a rollout is named twice in {list(rollouts)}")
        small = Forest(self.nodes.hashing)
        paths = [self.path(number).numpy() for number in rollouts]
        hashes = self.nodes.hash_rows([self.nodes.initial] * len(paths), paths)
        fresh = []
        for number, row, row_hashes in zip(rollouts, paths, hashes, strict=True):
            old = self.rollouts[number]
            copied = old.planted_again()
            small._walk(copied, row, row_hashes, old.segments, old.kinds, old.log_probs, old.versions)
            fresh.append(copied)
        small._add(fresh, "tokens" if self.unit is None else self.unit)
        return small

    def same_as(self, other: Forest) -> bool:
        """Say whether both hold the same prefixes and the same rollouts, however numbered and in whatever order."""
        return same(self, other)

    def to_arrays(self) -> dict[str, Tensor]:
        """Return all that the forest holds as tensors by name; what is not a number is JSON, under "about"."""
        return to_arrays(self)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], hashing: PrefixHash | None = None) -> Forest:
        """Build the forest of `to_arrays` again, under the hashing that it had.

        Raises `ForestError` under another, and for arrays that are no forest: it names the table and the row.
        """
        forest = cls(hashing)
        fill(forest, arrays)
        return forest

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: the tokens of this forest and no others; `subset` makes it small."""
        save_file(self.to_arrays(), Path(path))

    @classmethod
    def load(cls, path: str | Path, hashing: PrefixHash | None = None) -> Forest:
        """Read what `save` wrote, under the hashing that the forest had.

        Raises `ForestError` for another file, and for one whose digest does not fit: not a bit of it has changed.
        """
        return cls.from_arrays(load_file(Path(path)), hashing)


MCTSForest = Forest
"""The same under the name that people know."""
