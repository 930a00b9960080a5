"""The table of nodes: every distinct prefix once, as a segment of tokens that hangs from another.

A node is content alone: a segment of tokens, a parent, a depth and the hash of the prefix that ends there. Numbers stay
for good: a segment that is cut keeps its number for the lower part, so whoever ends there still does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ramet.forest.hashing import PrefixHash, absorb, initial, prefix_hashes

ROOT = 0
"""The node of the empty prefix: it has no tokens, no parent, and every prompt hangs from it."""

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Node:
    """The tokens `start` to `end` of the storage, which are the last of a prefix of `depth` tokens."""

    parent: int
    start: int
    end: int
    depth: int


class Nodes:
    """Segments over one storage of tokens, and of the hash of the prefix through each of them.

    `hashing` only finds a node; the stored tokens decide, so a weak hash costs time and never an answer.
    """

    def __init__(self, hashing: PrefixHash) -> None:
        self.hashing = hashing
        self.initial = initial(hashing)
        self.table = [Node(parent=-1, start=0, end=0, depth=0)]
        self.children: list[list[int]] = [[]]
        self._tokens = np.zeros(1024, dtype=np.int64)
        self._hashes = np.zeros(1024, dtype=np.int64)
        self._used = 0
        self.cuts: list[tuple[int, int]] = []  # the upper and the lower part of each segment that was cut, in order
        # The hash of a prefix through a node's FIRST token: where a row that leaves the parent is looked up.
        self._entries: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.table)

    @property
    def tokens(self) -> Ints:
        """All distinct tokens, in the order in which they came: a view."""
        return self._tokens[: self._used]

    def segment(self, node: int) -> Ints:
        """The tokens of one node."""
        found = self.table[node]
        return self._tokens[found.start : found.end]

    def hash(self, node: int, inside: int | None = None) -> int:
        """The hash of the prefix that ends with the node, or after `inside` > 0 tokens of its segment."""
        found = self.table[node]
        if found.parent < 0:
            return self.initial
        return int(self._hashes[found.end - 1 if inside is None else found.start + inside - 1])

    def ancestors(self, node: int) -> Iterator[int]:
        """Yield the node itself, then its parent, up to the empty prefix."""
        while node >= 0:
            yield node
            node = self.table[node].parent

    def index(self, node: int, above: int = 0) -> Ints:
        """Where in `tokens` the prefix that ends at `node` lies, token by token, without its first `above` tokens."""
        spans = []
        while (found := self.table[node]).depth > above:
            spans.append(np.arange(max(found.start, found.end - (found.depth - above)), found.end))
            node = found.parent
        return np.concatenate(spans[::-1]) if spans else np.zeros(0, dtype=np.int64)

    def top_down(self, root: int = ROOT) -> list[int]:
        """Every node below `root`, and itself, after its parent."""
        order = [root]
        for node in order:
            order += self.children[node]
        return order

    def hash_rows(self, starts: Sequence[int], rows: Sequence[Ints]) -> list[list[int]]:
        """The hash of every prefix of each row, where row i goes on from a prefix of hash `starts[i]`."""
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        values = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        flat = prefix_hashes(
            torch.from_numpy(values),
            torch.from_numpy(offsets),
            self.hashing,
            start=torch.tensor(starts, dtype=torch.int64),
        ).tolist()
        return [flat[offsets[i] : offsets[i + 1]] for i in range(len(rows))]

    def proven_hashes(
        self, rows: Sequence[Ints], prompts: Sequence[int], claims: Sequence[Ints]
    ) -> list[list[int]] | None:
        """The hash of every prefix of each whole row, where an environment made them already, or None if it did not.

        `claims[i]` are said to be the hashes of row i from its first `prompts[i]` tokens on. Each must follow from the
        one before, and all are tried at once, where a fold takes one token after the other.
        """
        heads = self.hash_rows([self.initial] * len(rows), [row[:n] for row, n in zip(rows, prompts, strict=True)])
        bases = [head[-1] if head else self.initial for head in heads]
        tails = [row[n:] for row, n in zip(rows, prompts, strict=True)]
        fits = [len(claim) == len(tail) + 1 for claim, tail in zip(claims, tails, strict=True)]
        if not all(fits) or [int(claim[0]) for claim in claims] != bases:
            return None
        tokens = torch.from_numpy(np.concatenate(tails))
        before, after = (np.concatenate(part) for part in ([c[:-1] for c in claims], [c[1:] for c in claims]))
        if not np.array_equal(absorb(torch.from_numpy(before), tokens, self.hashing), after):
            return None
        return [[*head, *claim[1:].tolist()] for head, claim in zip(heads, claims, strict=True)]

    def insert(self, node: int, row: Ints, hashes: Sequence[int]) -> int:
        """Walk from the end of `node` along `row`, sharing what is there; return the node where the row ends."""
        done = 0
        while done < len(row):
            child = self.child(node, int(row[done]), hashes[done])
            if child is None:
                return self._new(node, row[done:], hashes[done:])
            shared, whole = self._shared(child, row[done:])
            if shared < whole:
                child = self._split(child, shared)
            node = child
            done += shared
        return node

    def locate(self, row: Ints) -> tuple[int, int]:
        """Follow `row` from the empty prefix as far as it goes: the deepest node reached, and how many tokens fitted.

        The prefix of that many tokens ends with the node or inside its segment. Nothing is changed.
        """
        [hashes] = self.hash_rows([self.initial], [row])
        node, done = ROOT, 0
        while done < len(row):
            child = self.child(node, int(row[done]), hashes[done])
            if child is None:
                break
            shared, whole = self._shared(child, row[done:])
            node, done = child, done + shared
            if shared < whole:
                break
        return node, done

    def _shared(self, node: int, rest: Ints) -> tuple[int, int]:
        """How many first tokens of `rest` are those of the segment, and how many the segment has."""
        segment = self.segment(node)
        rest = rest[: len(segment)]
        differs = np.flatnonzero(segment[: len(rest)] != rest)
        return int(differs[0]) if differs.size else len(rest), len(segment)

    def child(self, node: int, token: int, entry: int) -> int | None:
        """Find the child whose segment begins with a token, by the hash of the prefix through that token."""
        for candidate in self._entries.get(entry, ()):
            found = self.table[candidate]
            # Equal parents are equal prefixes, so these two comparisons compare the stored tokens.
            if found.parent == node and self._tokens[found.start] == token:
                return candidate
        return None

    def _new(self, parent: int, tokens: Ints, hashes: Sequence[int]) -> int:
        start = self._used
        self._reserve(len(tokens))
        self._tokens[start : self._used] = tokens
        self._hashes[start : self._used] = hashes
        self.table.append(Node(parent, start, self._used, self.table[parent].depth + len(tokens)))
        self.children.append([])
        number = len(self.table) - 1
        self.children[parent].append(number)
        self._entries.setdefault(hashes[0], []).append(number)
        return number

    def _split(self, node: int, at: int) -> int:
        """Cut a segment after `at` tokens. The lower part keeps the number, so rollouts and children stay right."""
        lower, upper = self.table[node], len(self.table)
        middle = lower.start + at
        self.table.append(Node(lower.parent, lower.start, middle, lower.depth - (lower.end - middle)))
        self.children.append([node])
        siblings = self.children[lower.parent]
        siblings[siblings.index(node)] = upper
        bucket = self._entries[int(self._hashes[lower.start])]
        bucket[bucket.index(node)] = upper
        lower.parent, lower.start = upper, middle
        self._entries.setdefault(int(self._hashes[middle]), []).append(node)
        self.cuts.append((upper, node))
        return upper

    def _reserve(self, more: int) -> None:
        needed = self._used + more
        if needed > len(self._tokens):
            size = max(needed, 2 * len(self._tokens))
            tokens, hashes = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
            tokens[: self._used], hashes[: self._used] = self._tokens[: self._used], self._hashes[: self._used]
            self._tokens, self._hashes = tokens, hashes
        self._used = needed

    # ---------------------------------------------------------------- columns

    def columns(self) -> dict[str, Ints]:
        """Return the table as arrays: the tokens, where each node's lie, its parent and hash, and its children."""
        return {
            "tokens": self.tokens.copy(),
            "start": np.array([node.start for node in self.table], dtype=np.int64),
            "parent": np.array([node.parent for node in self.table], dtype=np.int64),
            "hash": np.array([self.hash(node) for node in range(len(self))], dtype=np.int64),
            "children": np.array([child for row in self.children for child in row], dtype=np.int64),
            "size": np.array([node.end - node.start for node in self.table], dtype=np.int64),
        }

    @classmethod
    def from_columns(cls, hashing: PrefixHash, columns: dict[str, Ints]) -> Nodes | None:
        """Build the table again; None where the hashes are not those of the tokens under `hashing`."""
        nodes = cls(hashing)
        starts, parents, sizes = (columns[key].tolist() for key in ("start", "parent", "size"))
        nodes._reserve(len(columns["tokens"]))
        nodes._tokens[: nodes._used] = columns["tokens"]
        nodes.table = [Node(p, s, s + n, 0) for p, s, n in zip(parents, starts, sizes, strict=True)]
        nodes.children = [[] for _ in parents]
        for child in columns["children"].tolist():
            nodes.children[parents[child]].append(child)
        level = list(nodes.children[ROOT])
        while level:
            before = [nodes.hash(parents[node]) for node in level]
            for node, row in zip(level, nodes.hash_rows(before, [nodes.segment(n) for n in level]), strict=True):
                found = nodes.table[node]
                nodes._hashes[found.start : found.end] = row
                found.depth = nodes.table[found.parent].depth + len(row)
                nodes._entries.setdefault(row[0], []).append(node)
            level = [child for node in level for child in nodes.children[node]]
        proven = [nodes.hash(node) for node in range(len(nodes))] == columns["hash"].tolist()
        return nodes if proven else None
