"""The two tables of a forest, how tokens come into them, and what is read from them.

*Nodes* hold content: a segment of tokens, a parent, a depth, the hash of the prefix that ends there; equal prefixes are
one node. *Rollouts* hold what happened: an end node, a group, a member, an outcome, a stop reason and, for each token
of the path, who wrote it, the sampler's log-prob and the version of its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest.hashing import PrefixHash, SipHash
from ramet.forest.nodes import Ints, Nodes
from ramet.forest.rollout import Rollout, Sampled, Unit, joined
from ramet.types import Kind


class Tables:
    """Nodes and rollouts; `Forest` is what to use.

    `unit` says what the integers are: token ids, or characters; None while nothing is there.
    """

    def __init__(self, hashing: PrefixHash | None = None) -> None:
        if hashing is not None and not callable(hashing):
            raise TypeError(f"hashing must map integers [N, 2] to integers [N], as SipHash() does: found {hashing!r}")
        self.nodes = Nodes(SipHash() if hashing is None else hashing)
        self.rollouts: list[Rollout] = []
        self.unit: Unit | None = None
        self._went_on: set[int] = set()  # the rollouts that grew since the nodes were last counted

    # ---------------------------------------------------------------- growing

    def plant(
        self,
        prompts: Sequence[Tensor],
        *,
        groups: Sequence[int],
        members: Sequence[int],
        prompt_indices: Sequence[int] | None = None,
        parts: Sequence[int] | None = None,
    ) -> list[int]:
        """Start a rollout at each prompt (int64 [L], L may be 0) and return the rollouts' numbers.

        `parts` says which part of its episode each is (see `Rollout`); 0 by default.
        """
        indices = [-1] * len(prompts) if prompt_indices is None else prompt_indices
        places = [0] * len(prompts) if parts is None else parts
        if not len(prompts) == len(groups) == len(members) == len(indices) == len(places):
            raise ForestError(
                f"plant: expected one group, member, prompt index and part for each of {len(prompts)} prompts: found "
                f"{len(groups)}, {len(members)}, {len(indices)} and {len(places)}"
            )
        rows = _token_rows("plant", prompts)
        self._check_unit("tokens")
        fresh = [
            Rollout(group=int(group), member=int(member), prompt_index=int(index), part=int(part))
            for group, member, index, part in zip(groups, members, indices, places, strict=True)
        ]
        unsampled = [np.full(len(row), np.nan, dtype=np.float32) for row in rows]
        self._append(fresh, rows, Kind.PROMPT, unsampled, [-1] * len(rows))
        return self._add(fresh, "tokens")

    def grow(
        self,
        rollouts: Sequence[int],
        tokens: Sequence[Tensor],
        kind: Kind,
        *,
        log_probs: Sequence[Tensor] | None = None,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Append a segment (int64 [n], n may be 0) to each of `rollouts`, which were planted.

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
        self._went_on.update(rollouts)

    def _walk(
        self,
        rollout: Rollout,
        row: Ints,
        hashes: list[int],
        segments: Sequence[int],
        kinds: NDArray[np.int8],
        log_probs: NDArray[np.float32],
        versions: NDArray[np.int32],
    ) -> None:
        """Put a whole rollout into the table, a node at the end of each segment."""
        start = 0
        for length in segments:
            part = slice(start, start + length)
            end = self.nodes.insert(rollout.end, row[part], hashes[part])
            rollout.append(end, kinds[part], log_probs[part], versions[part])
            start += length

    def _add(self, fresh: list[Rollout], unit: Unit) -> list[int]:
        self.rollouts += fresh
        if fresh:
            self.unit = unit
        return list(range(len(self.rollouts) - len(fresh), len(self.rollouts)))

    def _check_unit(self, unit: Unit) -> None:
        if self.unit not in (None, unit):
            raise ForestError(
                f"this forest holds rollouts of {self.unit}, and these are of {unit}",
                hint="keep texts without tokens in a forest of their own, or let a tokenizer write the tokens",
            )

    def _check_rollouts(self, rollouts: Sequence[int], rows: int) -> None:
        if len(rollouts) != rows:
            raise ForestError(f"grow: expected a row of tokens for each of {len(rollouts)} rollouts: found {rows}")
        self._check_numbers("grow", rollouts)
        if len(set(rollouts)) != len(rollouts):
            twice = next(number for number in rollouts if list(rollouts).count(number) > 1)
            raise ForestError(f"grow: rollout {twice} is named twice", hint="join its segments, or call grow for each")
        played = [number for number in rollouts if self.rollouts[number].steps is not None]
        if played:
            raise ForestError(
                f"grow: rollout {played[0]} came from an environment with its steps: it can not grow without them",
                hint="extend the forest by the rollout that goes on from it",
            )

    def _check_numbers(self, verb: str, rollouts: Sequence[int]) -> None:
        unknown = [number for number in rollouts if not 0 <= number < len(self.rollouts)]
        if unknown:
            raise ForestError(f"{verb}: no rollout {unknown[0]}: the forest has {len(self.rollouts)}, counted from 0")

    def _append(
        self,
        rollouts: list[Rollout],
        rows: list[Ints],
        kind: Kind,
        log_probs: list[NDArray[np.float32]],
        versions: list[int],
    ) -> None:
        hashes = self.nodes.hash_rows([self.nodes.hash(rollout.end) for rollout in rollouts], rows)
        for rollout, row, row_hashes, density, version in zip(rollouts, rows, hashes, log_probs, versions, strict=True):
            end = self.nodes.insert(rollout.end, row, row_hashes)
            kinds, marks = np.full(len(row), kind, dtype=np.int8), np.full(len(row), version, dtype=np.int32)
            rollout.append(end, kinds, density, marks)

    # ---------------------------------------------------------------- reading

    @property
    def tokens(self) -> Tensor:
        """All distinct tokens, int64 [number of tokens]: a view, in the order in which they came."""
        return torch.from_numpy(self.nodes.tokens)

    @property
    def episodes(self) -> list[int]:
        """For each rollout, which rollout is the first part of its episode: itself, where the episode has one part.

        Raises `ForestError` for a part that does not stand behind the part before it.
        """
        found: list[int] = []
        for number, rollout in enumerate(self.rollouts):
            before = self.rollouts[number - 1] if number else None
            told = (rollout.group, rollout.member, rollout.part - 1)
            if rollout.part and (before is None or (before.group, before.member, before.part) != told):
                raise ForestError(
                    f"rollout {number} is part {rollout.part} of group {rollout.group}, member {rollout.member}: "
                    f"expected part {rollout.part - 1} of the same right in front of it",
                    hint="plant the parts of an episode one behind the other",
                )
            found.append(found[-1] if rollout.part else number)
        return found

    @property
    def node_count(self) -> int:
        """N: how many nodes there are, the empty prefix included."""
        return len(self.nodes)

    def node_tokens(self, node: int) -> Tensor:
        """The segment of one node, int64."""
        return torch.from_numpy(self.nodes.segment(node))

    def parent(self, node: int) -> int:
        """The node that this one hangs from; -1 for the empty prefix."""
        return self.nodes.table[node].parent

    def children(self, node: int) -> list[int]:
        """The nodes that hang from this one, in the order in which they came."""
        return list(self.nodes.children[node])

    def depth(self, node: int) -> int:
        """How many tokens the prefix that ends at this node has."""
        return self.nodes.table[node].depth

    def hash(self, node: int) -> int:
        """The hash of the prefix that ends at this node."""
        return self.nodes.hash(node)

    def ancestors(self, node: int) -> Iterator[int]:
        """Yield the node itself, then its parent, up to the empty prefix."""
        return self.nodes.ancestors(node)

    def node_index(self, node: int) -> Tensor:
        """Where in `tokens` the prefix that ends at `node` lies, token by token: int64 [depth]."""
        return torch.from_numpy(self.nodes.index(node))

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
            index.append(self.nodes.index(rollout.end)[where])
            row.append(np.full(len(where), position, dtype=np.int64))
            log_probs.append(rollout.log_probs[where])
            versions.append(rollout.versions[where])
        return Sampled(
            index=torch.from_numpy(joined(index, np.int64)),
            row=torch.from_numpy(joined(row, np.int64)),
            log_probs=torch.from_numpy(joined(log_probs, np.float32)),
            versions=torch.from_numpy(joined(versions, np.int32)),
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


def _token_rows(verb: str, tokens: Sequence[Tensor]) -> list[Ints]:
    for number, row in enumerate(tokens):
        if row.ndim != 1 or row.is_floating_point() or row.dtype == torch.bool:
            raise ForestError(
                f"{verb}: row {number} must be token ids, integers [L]: found {row.dtype} {list(row.shape)}"
            )
    return [row.detach().cpu().to(torch.int64).numpy() for row in tokens]
