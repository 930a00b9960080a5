"""A view of the part of a forest that begins with one prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest.nodes import ROOT
from ramet.forest.plot import Mark, places, tree_figure
from ramet.forest.prefixes import text_of

if TYPE_CHECKING:
    from ramet.forest.forest import Forest

TreePath: TypeAlias = tuple[int, ...]
"""The way from the root of a tree to a node of it: which child, at each node. The root's is ()."""

Decode: TypeAlias = Callable[[list[int]], str]
"""From token ids to text."""


class Tree:
    """What a forest holds below one prefix, as `Forest.get_tree` returns it: nothing is copied.

    A *path* is the position of a child at every node from the root on, in the order in which the children came: `()`
    is the root, `(1, 0)` the first child of its second child. Every tree is a node of a larger one: `subtree` are those
    of its children. A prefix that ends inside a segment is a root like any other; its one child is what the segment
    still holds. A view goes with the forest as it grows; positions of children stay, but a segment that is cut is a
    node more on the way.

    >>> import torch
    >>> from ramet.forest import Forest
    >>> forest = Forest()
    >>> _ = forest.plant([torch.tensor(row) for row in ([5, 6, 7], [5, 6, 8, 9], [5, 6, 8, 4])],
    ...                  groups=[0, 0, 0], members=[0, 1, 2])
    >>> tree = forest.get_tree(torch.tensor([5]))
    >>> list(tree.valid_paths()), tree.max_length(), tree.num_vertices(), tree.visits
    ([(0, 0), (0, 1, 0), (0, 1, 1)], 3, 6, 3)
    >>> print(tree.to_string())
    () [5]  visits 3
      (0,) [6]  visits 3
        (0, 0) [7]  visits 1
        (0, 1) [8]  visits 2
          (0, 1, 0) [9]  visits 1
          (0, 1, 1) [4]  visits 1
    """

    def __init__(self, forest: Forest, node: int, depth: int, parent: Tree | None = None) -> None:
        self.forest = forest
        self.parent = parent
        self._below, self._depth = node, depth

    def _where(self) -> tuple[int, int]:
        """The node in which the prefix ends, and how many tokens of its segment belong to it: all, or fewer."""
        node, forest = self._below, self.forest
        while node != ROOT and forest.depth(forest.parent(node)) >= self._depth:
            node = forest.parent(node)  # it was cut after this view was made
        return node, self._depth - (forest.depth(forest.parent(node)) if node != ROOT else 0)

    @property
    def node(self) -> int:
        """The number of its root in the forest; -1 where the prefix ends inside a segment."""
        node, inside = self._where()
        return node if inside == len(self.forest.node_tokens(node)) else -1

    @property
    def depth(self) -> int:
        """How many tokens its prefix has."""
        return self._depth

    @property
    def hash(self) -> int:
        """The hash of its prefix."""
        node, inside = self._where()
        return self.forest.nodes.hash(node, inside or None)

    @property
    def prefix(self) -> Tensor:
        """All tokens up to its root, int64 [depth]."""
        return self.forest.tokens[self.forest.node_index(self._where()[0])[: self._depth]]

    @property
    def tokens(self) -> Tensor:
        """The tokens between its parent's prefix and its own, int64: the whole prefix where it has no parent."""
        above = 0 if self.parent is None else self.parent.depth
        forest, (node, _) = self.forest, self._where()
        return forest.tokens[torch.from_numpy(forest.nodes.index(node, above)[: self._depth - above])]

    @property
    def subtree(self) -> list[Tree]:
        """The trees of its children."""
        forest, (node, _) = self.forest, self._where()
        children = [node] if self.node < 0 else forest.children(node)
        return [Tree(forest, child, forest.depth(child), self) for child in children]

    @property
    def num_children(self) -> int:
        """How many children its root has."""
        node = self.node
        return 1 if node < 0 else len(self.forest.children(node))

    @property
    def is_terminal(self) -> bool:
        """Whether its root has no children."""
        return self.num_children == 0

    @property
    def visits(self) -> int:
        """How many rollouts begin with its prefix."""
        return self.forest._counts().visits_of(self._where()[0])

    @property
    def value(self) -> float:
        """The mean return of the rollouts that begin with its prefix: see `Forest.values`."""
        return self.forest._counts().value_of(self._where()[0])

    @property
    def prior(self) -> float:
        """The probability of its segment after its parent's: see `Forest.priors`; NaN inside a segment."""
        return self.forest._counts().prior_of(self.node) if self._is_whole() else math.nan

    def _is_whole(self) -> bool:
        """Whether it is a node with its whole segment: not one that begins or ends inside."""
        return self.node >= 0 and (self.parent is None or self.parent.node >= 0)

    @property
    def rollouts(self) -> list[int]:
        """The numbers of the rollouts that end with its prefix, exactly."""
        return self.forest._counts().ending(self.node)

    def _walk(self, path: TreePath = ()) -> Iterator[tuple[TreePath, Tree]]:
        """Yield every node with its path, each before its children."""
        waiting: list[tuple[TreePath, Tree]] = [(path, self)]
        while waiting:
            here, tree = waiting.pop()
            yield here, tree
            waiting += [((*here, i), child) for i, child in enumerate(tree.subtree)][::-1]

    def valid_paths(self) -> Iterator[TreePath]:
        """Yield the path to every place where a rollout ends: leaves, and nodes within where one stops early."""
        ends = {rollout.end for rollout in self.forest.rollouts}
        for path, tree in self._walk():
            if tree.node in ends:
                yield path

    def leaves(self) -> list[int]:
        """The numbers of the nodes without children."""
        return [tree.node for _, tree in self._walk() if tree.is_terminal]

    def vertices(self, *, key_type: Literal["id", "hash", "path"] = "hash") -> dict[Any, Tree]:
        """Return every node as a tree, by its number in the forest ("id"), the hash of its prefix, or its path."""
        keys: dict[str, Callable[[TreePath, Tree], Any]] = {
            "id": lambda _, tree: tree.node,
            "hash": lambda _, tree: tree.hash,
            "path": lambda path, _: path,
        }
        if key_type not in keys:
            raise ValueError(f'key_type must be "id", "hash" or "path": found {key_type!r}')
        return {keys[key_type](path, tree): tree for path, tree in self._walk()}

    def get_vertex_by_id(self, node: int) -> Tree:
        """Return the node of a number of the forest, as a tree; KeyError if it is not in this one."""
        return self.vertices(key_type="id")[node]

    def get_vertex_by_hash(self, hash: int) -> Tree:  # noqa: A002 (the name that people know)
        """Return the node whose prefix has a hash, as a tree; KeyError if it is not in this one."""
        return self.vertices(key_type="hash")[hash]

    def num_vertices(self) -> int:
        """How many nodes it has, its root included."""
        return sum(1 for _ in self._walk())

    def edges(self) -> list[tuple[int, int]]:
        """Return (parent, child) for every node but the root, as numbers of the forest."""
        return [(tree.parent.node, tree.node) for path, tree in self._walk() if path and tree.parent is not None]

    def max_length(self) -> int:
        """How many steps from node to node its longest path has."""
        return max(len(path) for path, _ in self._walk())

    def at(self, path: Sequence[int]) -> Tree:
        """Follow a path; `ForestError` where it leads nowhere."""
        tree = self
        for taken, position in enumerate(path):
            children = tree.subtree
            if not 0 <= position < len(children):
                raise ForestError(
                    f"no path {tuple(path)}: after {tuple(path[:taken])} there are {len(children)} children, counted "
                    f"from 0, and no child {position}",
                    hint="valid_paths() yields the paths that there are",
                )
            tree = children[position]
        return tree

    def rollout_from_path(self, path: Sequence[int], *, which: int = 0) -> TensorDictBase:
        """Give back a rollout that takes `path`: a lazy stack [T] of its steps, with the keys that it came with.

        Several may end where the path ends, each with its own rewards: `which` counts through them, in the order in
        which they came. Where none ends there, it counts through those that pass. The steps are those below the root
        of the tree, up to the end of the path; the steps in which they lie are whole, none is cut.
        """
        if isinstance(path, str) or not isinstance(path, Sequence) or any(type(step) is not int for step in path):
            raise TypeError(f"a path is a sequence of positions of children, as valid_paths gives them: found {path!r}")
        tree = self.at(path)
        numbers = tree.rollouts if tree.node >= 0 else []
        if not numbers:
            numbers = self.forest.rollouts_through(tree._where()[0])
        if not 0 <= which < len(numbers):
            raise ForestError(f"path {tuple(path)} has {len(numbers)} rollouts, counted from 0: found which={which}")
        return self.forest.rollout(numbers[which], above=self._depth, below=tree._depth)

    def to_string(self, node_format_fn: Callable[[Tree], object] | None = None, *, decode: Decode | None = None) -> str:
        """Draw it as text: a line for each node, with its path, its tokens and its numbers, those that are known.

        `node_format_fn` says what stands behind the path instead; `decode` turns token ids into text.
        """
        values = self.forest.values
        lines = []
        for place in places(self):
            tree = place.tree
            label = tree._label(decode, values) if node_format_fn is None else node_format_fn(tree)
            lines.append(f"{'  ' * place.level}{place.path} {label}")
        return "\n".join(lines)

    def _label(self, decode: Decode | None, values: Tensor) -> str:
        """Return its tokens and its numbers on one line; `values` are those of the forest, worked out once."""
        numbers = {"value": float(values[self._where()[0]]), "prior": self.prior}
        parts = [self._shown(decode), f"visits {self.visits}"]
        return "  ".join(parts + [f"{name} {x:.3g}" for name, x in numbers.items() if not math.isnan(x)])

    def _shown(self, decode: Decode | None) -> str:
        tokens = self.tokens
        if decode is not None:
            return repr(decode(tokens.tolist()))
        return repr(text_of(tokens.numpy())) if self.forest.unit == "text" else str(tokens.tolist())

    def plot(self, *, decode: Decode | None = None, make_labels: Callable[[Tree], str] | None = None) -> Any:
        """Draw it with plotly, its root at the top, and return the figure: `figure.show()` opens it.

        A node shows its visits; its line of `to_string` (or what `make_labels` says) appears under the pointer.
        """
        values = self.forest.values
        marks = []
        for place in places(self):
            tree = place.tree
            label = tree._label(decode, values) if make_labels is None else make_labels(tree)
            marks.append(Mark(place.parent, place.level, str(tree.visits), f"{place.path} {label}"))
        return tree_figure(marks)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles: a tree that is deep in its parents is no deep recursion.
        chain: list[tuple[int, int]] = []
        tree: Tree | None = self
        while tree is not None:
            chain.append((tree._below, tree._depth))
            tree = tree.parent
        return _under_its_parents, (self.forest, chain[::-1])

    def __repr__(self) -> str:
        return f"Tree(depth={self._depth}, visits={self.visits}, children={self.num_children})"


def _under_its_parents(forest: Forest, chain: Sequence[tuple[int, int]]) -> Tree | None:
    """Return the last of some trees, each the parent of the next: their nodes and depths."""
    tree: Tree | None = None
    for node, depth in chain:
        tree = Tree(forest, node, depth, tree)
    return tree
