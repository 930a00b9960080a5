"""The data model: every distinct prefix is stored once, every rollout keeps its own row.

Two tables. *Nodes* hold content: a segment of tokens, a parent, a depth, the hash of the prefix that ends there; equal
prefixes are one node. *Rollouts* hold what happened: an end node, a group, a member, an outcome, a stop reason and, for
each token of the path, who wrote it, the sampler's log-prob and the version of its weights. Rollouts are never merged:
eight identical completions are one path and eight rollouts with eight rewards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest.hashing import PrefixHash, SipHash, initial, prefix_hashes
from ramet.types import Kind, Outcome, StopReason

ROOT = 0
"""The node of the empty prefix: it has no tokens, no parent, and every prompt hangs from it."""


@dataclass(slots=True)
class _Node:
    parent: int
    start: int
    end: int
    depth: int
    hash: int


@dataclass(slots=True)
class Rollout:
    """One episode: a path through the forest and what belongs to this occurrence of it alone.

    `end` is the node where its path ends; `group` and `member` say which completion of which prompt it is. `kinds`
    int8, `log_probs` float32 (NaN where the token was not sampled) and `versions` int32 (-1 likewise) have one entry
    for each token of the path, prompt included.
    """

    group: int
    member: int
    prompt_index: int
    end: int = ROOT
    stop: StopReason | None = None
    outcome: Outcome | None = None
    advantage: float = 0.0
    _kinds: list[np.ndarray] = field(default_factory=list)
    _log_probs: list[np.ndarray] = field(default_factory=list)
    _versions: list[np.ndarray] = field(default_factory=list)

    @property
    def kinds(self) -> np.ndarray:
        """Who wrote each token of the path, as `Kind`."""
        return _joined(self._kinds, np.int8)

    @property
    def log_probs(self) -> np.ndarray:
        """The sampler's log-prob of each token of the path."""
        return _joined(self._log_probs, np.float32)

    @property
    def versions(self) -> np.ndarray:
        """The version of the weights that sampled each token of the path."""
        return _joined(self._versions, np.int32)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled tokens of some rollouts, flat: every field is [M].

    `index` points into `Forest.tokens`, so `scores.log_probs[sampled.index]` are their current log-probs; `row` is the
    position of the token's rollout in the list that was asked for; `log_probs` are the sampler's.
    """

    index: Tensor
    row: Tensor
    log_probs: Tensor
    versions: Tensor

    @property
    def lengths(self) -> Tensor:
        """How many sampled tokens the whole rollout of each token has: int64 [M]."""
        return torch.bincount(self.row)[self.row] if self.row.numel() else self.row


class Forest:
    """Rollouts over shared prefixes.

    `hashing` maps int64 [N, 2] (hash of a prefix, next token) to int64 [N]: the default is a keyed SipHash. A hash only
    finds a node; the stored tokens decide, so a weak hash costs time and never an answer.

    >>> forest = Forest()
    >>> a, b = forest.plant([torch.tensor([5, 6])] * 2, groups=[0, 0], members=[0, 1])
    >>> forest.grow([a, b], [torch.tensor([7]), torch.tensor([7, 8])], Kind.SAMPLED,
    ...             log_probs=[torch.tensor([-0.5]), torch.tensor([-0.5, -1.0])], versions=[0, 0])
    >>> forest.node_count, forest.tokens.tolist()          # the prompt once, the shared 7 once
    (4, [5, 6, 7, 8])
    >>> [forest.path(r).tolist() for r in (a, b)]
    [[5, 6, 7], [5, 6, 7, 8]]
    """

    def __init__(self, hashing: PrefixHash | None = None) -> None:
        self._hashing: PrefixHash = SipHash() if hashing is None else hashing
        self._buffer = np.zeros(1024, dtype=np.int64)
        self._used = 0
        self._nodes = [_Node(parent=-1, start=0, end=0, depth=0, hash=initial(self._hashing))]
        self._children: list[list[int]] = [[]]
        # The hash of a prefix through a node's FIRST token: where a row that leaves the parent is looked up.
        self._entries: dict[int, list[int]] = {}
        self.rollouts: list[Rollout] = []

    # ---------------------------------------------------------------- growing

    def plant(
        self,
        prompts: Sequence[Tensor],
        *,
        groups: Sequence[int],
        members: Sequence[int],
        prompt_indices: Sequence[int] | None = None,
    ) -> list[int]:
        """Start a rollout at each prompt (int64 [L], L may be 0) and return the rollouts' numbers."""
        indices = [-1] * len(prompts) if prompt_indices is None else prompt_indices
        if not len(prompts) == len(groups) == len(members) == len(indices):
            raise ForestError(
                f"plant: expected one group, member and prompt index for each of {len(prompts)} prompts: found "
                f"{len(groups)}, {len(members)} and {len(indices)}"
            )
        rows = _token_rows("plant", prompts)
        fresh = [
            Rollout(group=int(group), member=int(member), prompt_index=int(index))
            for group, member, index in zip(groups, members, indices, strict=True)
        ]
        unsampled = [np.full(len(row), np.nan, dtype=np.float32) for row in rows]
        self._append(fresh, rows, Kind.PROMPT, unsampled, [-1] * len(rows))
        self.rollouts += fresh
        return list(range(len(self.rollouts) - len(fresh), len(self.rollouts)))

    def grow(
        self,
        rollouts: Sequence[int],
        tokens: Sequence[Tensor],
        kind: Kind,
        *,
        log_probs: Sequence[Tensor] | None = None,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Append a segment (int64 [n], n may be 0) to each of `rollouts`.

        No rollout may be named twice. Sampled tokens need the sampler's log-probs (float [n], in each row as many as
        tokens) and the version of the weights; other tokens must have neither. Raises `ForestError`, and changes
        nothing, where they do not fit.
        """
        rows = _token_rows("grow", tokens)
        self._check_rollouts(rollouts, len(rows))
        sampled = kind is Kind.SAMPLED
        if sampled != (log_probs is not None) or sampled != (versions is not None):
            raise ForestError(
                f"grow: log_probs and versions belong to sampled tokens and to no others: found kind {kind.name}, "
                f"log_probs {'given' if log_probs is not None else 'missing'}, "
                f"versions {'given' if versions is not None else 'missing'}"
            )
        marks = [-1] * len(rows) if versions is None else [int(version) for version in versions]
        if len(marks) != len(rows):
            raise ForestError(f"grow: expected a version for each of {len(rows)} rows: found {len(marks)}")
        if log_probs is None:
            densities = [np.full(len(row), np.nan, dtype=np.float32) for row in rows]
        else:
            # A copy: what the caller does to the tensor afterwards is nothing to the forest.
            densities = [row.detach().to("cpu", torch.float32, copy=True).numpy() for row in log_probs]
        if [row.shape for row in densities] != [row.shape for row in rows]:
            raise ForestError(
                f"grow: expected as many log-probs as tokens in each row: found {[row.shape for row in densities]} "
                f"log-probs for {[row.shape for row in rows]} tokens"
            )
        self._append([self.rollouts[number] for number in rollouts], rows, kind, densities, marks)

    def _check_rollouts(self, rollouts: Sequence[int], rows: int) -> None:
        if len(rollouts) != rows:
            raise ForestError(f"grow: expected a row of tokens for each of {len(rollouts)} rollouts: found {rows}")
        unknown = [number for number in rollouts if not 0 <= number < len(self.rollouts)]
        if unknown:
            raise ForestError(f"grow: no rollout {unknown[0]}: the forest has {len(self.rollouts)}, counted from 0")
        if len(set(rollouts)) != len(rollouts):
            twice = next(number for number in rollouts if list(rollouts).count(number) > 1)
            raise ForestError(f"grow: rollout {twice} is named twice", hint="join its segments, or call grow for each")

    def _append(
        self,
        rollouts: list[Rollout],
        rows: list[np.ndarray],
        kind: Kind,
        log_probs: list[np.ndarray],
        versions: list[int],
    ) -> None:
        hashes = self._hash_rows([self._nodes[rollout.end].hash for rollout in rollouts], rows)
        for rollout, row, row_hashes, density, version in zip(rollouts, rows, hashes, log_probs, versions, strict=True):
            rollout.end = self._insert(rollout.end, row, row_hashes)
            rollout._kinds.append(np.full(len(row), kind, dtype=np.int8))
            rollout._log_probs.append(density)
            rollout._versions.append(np.full(len(row), version, dtype=np.int32))

    def _hash_rows(self, starts: list[int], rows: list[np.ndarray]) -> list[list[int]]:
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        values = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        flat = prefix_hashes(
            torch.from_numpy(values),
            torch.from_numpy(offsets),
            self._hashing,
            start=torch.tensor(starts, dtype=torch.int64),
        ).tolist()
        return [flat[offsets[i] : offsets[i + 1]] for i in range(len(rows))]

    def _insert(self, node: int, row: np.ndarray, hashes: list[int]) -> int:
        """Walk from the end of `node` along `row`, sharing what is there; return the node where the row ends."""
        done = 0
        while done < len(row):
            child = self._child(node, int(row[done]), hashes[done])
            if child is None:
                return self._new_node(node, row[done:], hashes[done], hashes[-1])
            here = self._nodes[child]
            segment = self._buffer[here.start : here.end]
            rest = row[done : done + len(segment)]
            differs = np.flatnonzero(segment[: len(rest)] != rest)
            shared = int(differs[0]) if differs.size else len(rest)
            if shared < len(segment):
                child = self._split(child, shared, hashes[done + shared - 1])
            node = child
            done += shared
        return node

    def _child(self, node: int, token: int, entry: int) -> int | None:
        for candidate in self._entries.get(entry, ()):
            found = self._nodes[candidate]
            # Equal parents are equal prefixes, so these two comparisons compare the stored tokens.
            if found.parent == node and self._buffer[found.start] == token:
                return candidate
        return None

    def _new_node(self, parent: int, tokens: np.ndarray, entry: int, end_hash: int) -> int:
        start = self._used
        self._reserve(len(tokens))
        self._buffer[start : self._used] = tokens
        depth = self._nodes[parent].depth + len(tokens)
        self._nodes.append(_Node(parent=parent, start=start, end=self._used, depth=depth, hash=end_hash))
        self._children.append([])
        number = len(self._nodes) - 1
        self._children[parent].append(number)
        self._entries.setdefault(entry, []).append(number)
        return number

    def _split(self, node: int, at: int, hash_at: int) -> int:
        """Cut a segment after `at` tokens. The lower part keeps the number, so rollouts and children stay right."""
        lower = self._nodes[node]
        upper = len(self._nodes)
        middle = lower.start + at
        top = _Node(lower.parent, lower.start, middle, lower.depth - (lower.end - middle), hash_at)
        self._nodes.append(top)
        self._children.append([node])
        siblings = self._children[lower.parent]
        siblings[siblings.index(node)] = upper
        entry_of_lower = self._hash_rows([hash_at], [self._buffer[middle : middle + 1]])[0][0]
        parent_hash = self._nodes[lower.parent].hash
        bucket = self._entries[self._hash_rows([parent_hash], [self._buffer[lower.start : lower.start + 1]])[0][0]]
        bucket[bucket.index(node)] = upper
        lower.parent, lower.start = upper, middle
        self._entries.setdefault(entry_of_lower, []).append(node)
        return upper

    def _reserve(self, more: int) -> None:
        needed = self._used + more
        if needed > len(self._buffer):
            grown = np.zeros(max(needed, 2 * len(self._buffer)), dtype=np.int64)
            grown[: self._used] = self._buffer[: self._used]
            self._buffer = grown
        self._used = needed

    # ---------------------------------------------------------------- reading

    @property
    def tokens(self) -> Tensor:
        """All distinct tokens, int64 [number of tokens]: a view, in the order in which they came."""
        return torch.from_numpy(self._buffer[: self._used])

    @property
    def node_count(self) -> int:
        """N: how many nodes there are, the empty prefix included."""
        return len(self._nodes)

    def node_tokens(self, node: int) -> Tensor:
        """The segment of one node, int64."""
        return self.tokens[self._nodes[node].start : self._nodes[node].end]

    def parent(self, node: int) -> int:
        """The node that this one hangs from; -1 for the empty prefix."""
        return self._nodes[node].parent

    def children(self, node: int) -> list[int]:
        """The nodes that hang from this one, in the order in which they came."""
        return list(self._children[node])

    def depth(self, node: int) -> int:
        """How many tokens the prefix that ends at this node has."""
        return self._nodes[node].depth

    def hash(self, node: int) -> int:
        """The hash of the prefix that ends at this node."""
        return self._nodes[node].hash

    def ancestors(self, node: int) -> Iterator[int]:
        """Yield the node itself, then its parent, up to the empty prefix."""
        while node >= 0:
            yield node
            node = self._nodes[node].parent

    def node_index(self, node: int) -> Tensor:
        """Where in `tokens` the prefix that ends at `node` lies, token by token: int64 [depth]."""
        spans = [(self._nodes[n].start, self._nodes[n].end) for n in self.ancestors(node)]
        pieces = [np.arange(start, end) for start, end in reversed(spans)]
        return torch.from_numpy(np.concatenate(pieces)) if pieces else torch.zeros(0, dtype=torch.int64)

    def path(self, rollout: int) -> Tensor:
        """The whole row of tokens of a rollout, int64 [L]."""
        return self.tokens[self.node_index(self.rollouts[rollout].end)]

    def prompt_and_completion(self, rollout: int) -> tuple[Tensor, Tensor]:
        """The tokens up to the first one that is not prompt, and the rest."""
        path = self.path(rollout)
        kinds = self.rollouts[rollout].kinds
        others = np.flatnonzero(kinds != Kind.PROMPT)
        cut = int(others[0]) if others.size else len(kinds)
        return path[:cut], path[cut:]

    def sampled(self, rollouts: Sequence[int]) -> Sampled:
        """Flatten the sampled tokens of `rollouts`, row after row."""
        index, row, log_probs, versions = [], [], [], []
        for position, number in enumerate(rollouts):
            rollout = self.rollouts[number]
            where = np.flatnonzero(rollout.kinds == Kind.SAMPLED)
            index.append(self.node_index(rollout.end).numpy()[where])
            row.append(np.full(len(where), position, dtype=np.int64))
            log_probs.append(rollout.log_probs[where])
            versions.append(rollout.versions[where])
        return Sampled(
            index=torch.from_numpy(_joined(index, np.int64)),
            row=torch.from_numpy(_joined(row, np.int64)),
            log_probs=torch.from_numpy(_joined(log_probs, np.float32)),
            versions=torch.from_numpy(_joined(versions, np.int32)),
        )

    def batches(self, rollouts: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
        """Cut `rollouts` into runs whose padded rows hold at most `max_tokens` tokens (a longer row goes alone)."""
        batch: list[int] = []
        longest = 0
        for number in rollouts:
            length = self.depth(self.rollouts[number].end)
            if batch and max(longest, length) * (len(batch) + 1) > max_tokens:
                yield batch
                batch, longest = [], 0
            batch.append(number)
            longest = max(longest, length)
        if batch:
            yield batch


def _token_rows(verb: str, tokens: Sequence[Tensor]) -> list[np.ndarray]:
    for number, row in enumerate(tokens):
        if row.ndim != 1 or row.is_floating_point() or row.dtype == torch.bool:
            raise ForestError(
                f"{verb}: row {number} must be token ids, integers [L]: found {row.dtype} {list(row.shape)}"
            )
    return [row.detach().cpu().to(torch.int64).numpy() for row in tokens]


def _joined(pieces: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.zeros(0, dtype=dtype)
