"""The engine that goes node by node: a prefix runs once, its cache stays in the autograd graph, its children fork it.

It asks of a model no more than a cache that can be continued by several tokens, so it serves recurrent and hybrid
layers and biases by distance as well as attention. Inner nodes run alone and unpadded, which a recurrent state needs;
leaves of one parent run together, padded on the right, where nothing real comes after the padding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from ramet.errors import ModelError
from ramet.scoring.halves import Halves
from ramet.scoring.rows import Options, Row, rows_to_score, spread
from ramet.scoring.running import autocast_context, forward_parameters

if TYPE_CHECKING:
    from ramet.forest import Forest

WORTH_SHARING = 16
"""An inner node is shared if that spares at least so many tokens; a shorter one costs more as a pass of its own."""


@dataclass(slots=True, eq=False)
class Segment:
    """A node of the tree of what is to be scored: a run of tokens after a shared prefix of `depth` tokens.

    `index` int64 [L] says where its tokens lie in the forest, `wanted` bool [L] which of them are scored.
    """

    depth: int
    index: Tensor
    wanted: Tensor
    children: list[Segment] = field(default_factory=list)

    @property
    def end(self) -> int:
        """How many tokens the prefix that ends with this segment has."""
        return self.depth + len(self.index)

    def top_down(self) -> list[Segment]:
        """Return the segment and all below it, each after its parent."""
        order = [self]
        for segment in order:
            order += segment.children
        return order


def score_nodes(
    model: nn.Module, forest: Forest, rollouts: Sequence[int], options: Options, *, worth: int = WORTH_SHARING
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies [number of tokens], as `score_rows` does, with each shared prefix run once.

    `worth` is the number of tokens that sharing an inner node must spare; `options.max_tokens` bounds the padded
    tokens of one forward pass over leaves (the cache of their prefix, a copy for each leaf, is not counted). With
    `options.gradient_checkpointing` each pass is computed again in the backward pass, so that no more than the caches
    of inner nodes and one pass are held. Raises `ModelError` for a model that keeps no cache.

    A model that drops the state of its cache when several tokens follow (Mamba, Jamba), or whose positions depend on
    the length of the row (dynamic and long rope beyond the original length), is wrong here without an error.
    """
    walk = _Walk(model, forest.tokens, options)
    walk.over(fold_short(tree_of(rows_to_score(forest, rollouts)), worth))
    return spread(walk.places, walk.log_probs, walk.entropies, len(forest.tokens))


# ---------------------------------------------------------------- the tree


def tree_of(rows: Sequence[Row]) -> Segment:
    """Merge rows that start at the same places of a forest; return a segment without tokens above all of them.

    >>> shared = [Row(torch.tensor([0, 1, 2]), torch.tensor([2])), Row(torch.tensor([0, 1, 3]), torch.tensor([1, 2]))]
    >>> [prompt] = tree_of(shared).children
    >>> prompt.index.tolist(), prompt.wanted.tolist(), [child.index.tolist() for child in prompt.children]
    ([0, 1], [False, True], [[2], [3]])
    """
    total = max((int(row.index.max()) + 1 for row in rows), default=0)
    wanted = torch.zeros(total, dtype=torch.bool)
    for row in rows:
        wanted[row.index[row.wanted]] = True
    root = Segment(0, torch.zeros(0, dtype=torch.int64), wanted[:0])
    line = [root]  # from the root to the end of the row before
    before = root.index
    for path in sorted((row.index for row in rows), key=Tensor.tolist):
        shared = _shared(before, path)
        below = None
        while line[-1].end > shared:
            below = line.pop()
        if below is not None and below.depth < shared:
            line.append(_cut(below, shared - below.depth))
        if len(path) > shared:
            leaf = Segment(shared, path[shared:], wanted[path[shared:]])
            line[-1].children.append(leaf)
            line.append(leaf)
        before = path
    return root


def _shared(one: Tensor, other: Tensor) -> int:
    """How many first places two paths have in common."""
    both = min(len(one), len(other))
    differs = torch.nonzero(one[:both] != other[:both])
    return int(differs[0]) if len(differs) else both


def _cut(segment: Segment, at: int) -> Segment:
    """Make a segment the upper part of itself, above a lower one with all that it had below; return it."""
    lower = Segment(segment.depth + at, segment.index[at:], segment.wanted[at:], segment.children)
    segment.index, segment.wanted, segment.children = segment.index[:at], segment.wanted[:at], [lower]
    return segment


def fold_short(root: Segment, worth: int) -> Segment:
    """Join inner nodes that are not worth a pass of their own to each of their children, from the leaves up.

    A node of L tokens with n children spares L · (n - 1) tokens when it is shared. One of a single token never is: a
    recurrent model takes it for a step of decoding, and writes its state over what the backward pass has yet to read.
    What is wanted of a joined node is asked of its first child alone. The tree is changed; its root stays the root.
    """
    for segment in reversed(root.top_down()):
        children: list[Segment] = []
        for child in segment.children:
            length = len(child.index)
            short = length == 1 or length * (len(child.children) - 1) < worth
            children += _joined(child) if child.children and short else [child]
        segment.children = children
    return root


def _joined(segment: Segment) -> list[Segment]:
    nothing = torch.zeros_like(segment.wanted)
    return [
        Segment(
            segment.depth,
            torch.cat([segment.index, child.index]),
            torch.cat([nothing if number else segment.wanted, child.wanted]),
            child.children,
        )
        for number, child in enumerate(segment.children)
    ]


# ---------------------------------------------------------------- the cache


def fork(cache: Any, copies: int, device: torch.device) -> Any:
    """Return a cache that goes on from `cache` for `copies` rows, and leaves it as it is for whoever forks it next.

    The objects are copied and the tensors are not, but for the rows that `reorder_cache` gathers, with gradient.
    """
    forked = copy.copy(cache)
    forked.layers = [_same_layer(layer) for layer in cache.layers]
    forked.reorder_cache(torch.zeros(copies, dtype=torch.int64, device=device))
    return forked


def _same_layer(layer: Any) -> Any:
    """Copy one layer of a cache, but for its tensors; a recurrent one will take new states instead of writing them.

    transformers writes states in place, to keep their addresses, over what the backward pass has yet to read.
    """
    same = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(same, name, dict(value))
    if hasattr(same, "update_recurrent_state"):
        same.update_recurrent_state = partial(_take_state, same)
    return same


def _recurs(cache: Any) -> bool:
    return any(hasattr(layer, "update_recurrent_state") for layer in cache.layers)


def _take_state(layer: Any, recurrent_states: Tensor, state_idx: int = 0) -> Tensor:
    layer.is_recurrent_states_initialized[state_idx] = True
    layer.recurrent_states[state_idx] = recurrent_states
    return recurrent_states


# ---------------------------------------------------------------- the walk


@dataclass(frozen=True, slots=True)
class Asked:
    """Which logits of a pass are wanted, [M] each: the row, the column, and the place in the forest of what follows."""

    line: Tensor
    column: Tensor
    place: Tensor


def asked_of(line: int, segment: Segment) -> Asked:
    """Return what to ask of a segment's own pass: the tokens after its first, and the first token of each child."""
    inside = torch.nonzero(segment.wanted[1:]).squeeze(1)
    after = [child.index[0] for child in segment.children if bool(child.wanted[0])]
    last = torch.full((len(after),), len(segment.index) - 1, dtype=torch.int64)
    column = torch.cat([inside, last])
    place = torch.cat([segment.index[1:][inside], torch.stack(after) if after else inside[:0]])
    return Asked(torch.full_like(column, line), column, place)


def leaf_batches(leaves: Iterable[Segment], max_tokens: int | None) -> list[list[Segment]]:
    """Put leaves into batches of at most `max_tokens` padded tokens (a longer leaf goes alone), the short ones first.

    The last token of a leaf predicts nothing and is not run: a leaf of one token is in no batch.
    """
    batches: list[list[Segment]] = []
    for leaf in sorted(leaves, key=lambda leaf: len(leaf.index)):
        length = len(leaf.index) - 1
        if length == 0:
            continue
        if batches and (max_tokens is None or length * (len(batches[-1]) + 1) <= max_tokens):
            batches[-1].append(leaf)
        else:
            batches.append([leaf])
    return batches


class _Continued(Halves):
    """The two halves of a model whose body goes on from a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        known = forward_parameters(self.backbone)
        # The name differs between versions of transformers.
        self._keyword = next((name for name in ("cache", "past_key_values") if name in known), "")
        if not self._keyword or getattr(self.model, "config", None) is None:
            raise ModelError(
                f"{type(self.model).__name__} can not go on from a prefix: its body takes no cache, or has no config",
                hint="score it by rows",
            )

    def after(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return the hidden states [B, L, d] of `ids` at `positions`, int64 [B, L]; `cache` grows by them."""
        options: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
        outputs = self.backbone(input_ids=ids, use_cache=True, **{self._keyword: cache}, **options)
        hidden: Tensor = outputs.last_hidden_state
        # What the head is given besides the hidden states: nothing that would keep them, or the cache, alive.
        self._outputs = type(outputs)()
        return hidden


class _Walk:
    """One walk over the tree: how the model is called, and what was found so far."""

    def __init__(self, model: nn.Module, tokens: Tensor, options: Options) -> None:
        self.halves, self.tokens, self.options = _Continued(model), tokens, options
        self.device = next(model.parameters()).device
        self.places: list[Tensor] = []
        self.log_probs: list[Tensor] = []
        self.entropies: list[Tensor | None] = []

    def over(self, root: Segment) -> None:
        """Run everything under `root`, which has no tokens: each inner node, then its leaves, then what is below."""
        pending: list[tuple[Segment, Any]] = [(root, None)]
        while pending:
            segment, above = pending.pop()
            cache = None if segment is root else self._run([segment], above)
            leaves = [child for child in segment.children if not child.children]
            for batch in leaf_batches(leaves, self.options.max_tokens):
                self._run(batch, cache)
            pending += [(child, cache) for child in reversed(segment.children) if child.children]

    def _run(self, segments: list[Segment], cache: Any) -> Any:
        """Run segments that follow `cache` as rows padded on the right, keep what is wanted, return their own cache."""
        # The last token of a leaf predicts nothing. Padding needs no mask: no real token comes after it.
        inputs = [segment.index if segment.children else segment.index[:-1] for segment in segments]
        longest = max(len(index) for index in inputs)
        # A single token is a step of decoding to recurrent layers: see `fold_short`.
        width = 2 if longest == 1 and cache is not None and _recurs(cache) else longest
        ids = torch.zeros(len(segments), width, dtype=torch.int64)
        for number, index in enumerate(inputs):
            ids[number, : len(index)] = self.tokens[index]
        hidden, own = self._pass(ids.to(self.device), segments[0].depth, cache)
        parts = [asked_of(number, segment) for number, segment in enumerate(segments)]
        place = torch.cat([part.place for part in parts])
        if len(place):
            line, column = (torch.cat([getattr(part, name) for part in parts]) for name in ("line", "column"))
            asked = hidden[line.to(self.device), column.to(self.device)]
            values, entropy = self.halves.log_probs(asked, self.tokens[place].to(self.device), self.options)
            self.places.append(place.to(self.device))
            self.log_probs.append(values)
            self.entropies.append(entropy)
        return own

    def _pass(self, ids: Tensor, depth: int, cache: Any) -> tuple[Tensor, Any]:
        """Return hidden states [B, L, d] of rows that start at position `depth`, and the cache that grew by them."""
        positions = torch.arange(depth, depth + ids.shape[1], device=ids.device).expand_as(ids)

        def run() -> tuple[Tensor, Any]:
            own = DynamicCache(config=self.halves.model.config) if cache is None else fork(cache, len(ids), ids.device)
            with autocast_context(ids.device, self.options.autocast):
                return self.halves.after(ids, positions, own), own

        if self.options.gradient_checkpointing and torch.is_grad_enabled():
            # As a whole: a layer alone would find its cache grown already when it is computed again, where `run` forks
            # anew. What is kept are the caches of inner nodes, which their children read.
            found: tuple[Tensor, Any] = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
            return found
        return run()
