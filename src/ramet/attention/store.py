"""Attention while text is generated: the keys of each distinct prompt once, read by all the rows that go on from it.

Prompts are run as a tree, so that what several of them begin with is computed once, and each layer keeps its keys and
values. Then one token of every live row runs at a time. It attends to its prompt's keys, which the rows of one prompt
read together, and to the row's own, which grow block by block and are never copied as they grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ramet.attention.blocks import Blocks, Ints, Layout
from ramet.attention.tree import Rule, tree_attention
from ramet.errors import ModelError

BLOCK = 128
"""How many steps one block of a row's own keys holds."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """P distinct prompts as one row of T tokens, in which what two of them begin with stands once.

    `tokens` int64 [T]; `paths` holds for each prompt, in the order given, where its tokens stand in the row.
    """

    tokens: Tensor
    layout: Layout
    paths: list[Ints]

    @classmethod
    def of(cls, prompts: Sequence[Tensor]) -> Prefixes:
        """Lay out `prompts`, int64 [L] each and none of them empty.

        >>> laid = Prefixes.of([torch.tensor([1, 5, 6]), torch.tensor([1, 4]), torch.tensor([1, 5])])
        >>> laid.tokens.tolist(), [path.tolist() for path in laid.paths]
        ([1, 4, 5, 6], [[0, 2, 3], [0, 1], [0, 2]])
        """
        rows = [prompt.numpy() for prompt in prompts]
        # In the order of a dictionary, what two prompts share is shared by all that stand between them.
        order = sorted(range(len(rows)), key=lambda number: rows[number].tolist())
        paths: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(rows)
        fresh, total = [], 0
        before, path = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        for number in order:
            row = rows[number]
            shared = _shared(row, before)
            path = np.concatenate([path[:shared], np.arange(total, total + len(row) - shared)])
            fresh.append(row[shared:])
            total += len(row) - shared
            paths[number], before = path, row
        last, positions = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
        for number in order:
            last[paths[number]] = paths[number].max() + 1
            positions[paths[number]] = np.arange(len(rows[number]))
        return cls(torch.from_numpy(np.concatenate(fresh)), Layout(last, positions), paths)


def in_passes(prompts: Sequence[Tensor], most: int) -> list[slice]:
    """Cut prompts into runs of at most `most` distinct tokens (a longer prompt goes alone).

    What neighbours begin with counts once: give the prompts in the order of a dictionary.

    >>> in_passes([torch.tensor([1, 4]), torch.tensor([1, 4, 5]), torch.tensor([7])], most=3)
    [slice(0, 2, None), slice(2, 3, None)]
    """
    starts, held = [0], 0
    for number, prompt in enumerate(prompts):
        fresh = len(prompt)
        if number > starts[-1]:
            fresh -= _shared(prompt.numpy(), prompts[number - 1].numpy())
            if held + fresh > most:
                starts.append(number)
                held, fresh = 0, len(prompt)
        held += fresh
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(prompts)], strict=True)]


def _shared(row: Ints, other: Ints) -> int:
    """Return how many tokens both begin with."""
    both = min(len(row), len(other))
    differs = np.flatnonzero(row[:both] != other[:both])
    return int(differs[0]) if differs.size else both


@dataclass(slots=True)
class _Kept:
    """What one layer keeps: the prompts' keys [P, Hk, L, D] and values [P, Hk, L, E], and blocks of the rows' own.

    Blocks are [B, Hk, n, D] and [B, Hk, n, E]; `steps` counts the tokens of a row in them.
    """

    keys: Tensor
    values: Tensor
    filled: int = 0
    steps: int = 0
    blocks: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Seats:
    """Which rows go on from which prompt: row i is number `place[i]` among those of prompt `prompt[i]`, int64 [B].

    `rows` int64 [P, G] lists them by prompt, G of the prompt that has the most; where there are fewer, row 0 stands
    in. `even` says that there are G of each and that they stand in this order already. `mask` float [B, 1, 1, L] is
    -inf on the padding before short prompts, None where there is none.
    """

    rows: Tensor
    prompt: Tensor
    place: Tensor
    even: bool
    mask: Tensor | None


class PrefixStore:
    """The `Attention` of a generation from P prompts, of `lengths` tokens each, for at most `steps` tokens a row.

    Run every prompt once (`prefill`), say which rows go on from which (`seat`), then call `step` before each forward
    pass of one token of every row; `keep` when rows have ended. A layer is told by its module.

    Raises `ModelError` where a layer is run twice in one pass, for then it has two sets of keys.
    """

    def __init__(self, lengths: Sequence[int], steps: int, device: torch.device) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._width = int(self._lengths.max())
        self._device = device
        self._limit = steps
        self._layers: dict[int, _Kept] = {}
        self._blocks: dict[int | None, Blocks] = {}
        self._laid: Layout | None = None
        self._part = slice(0, 0)
        self._index = torch.zeros(0, dtype=torch.int64)
        self._owner = np.zeros(0, dtype=np.int64)
        self._seats: _Seats | None = None
        self._steps = 0

    # ------------------------------------------------------------ the prompts

    def prefill(self, laid: Prefixes, first: int) -> None:
        """Get ready for a pass over the prompts from number `first` on."""
        self._laid, self._blocks = laid.layout, {}
        self._part = slice(first, first + len(laid.paths))
        # The ends stand in line, so that a window over what a row has seen begins in the same column for all rows.
        index = np.zeros((len(laid.paths), self._width), dtype=np.int64)
        for number, path in enumerate(laid.paths):
            index[number, self._width - len(path) :] = path
        self._index = torch.from_numpy(index).to(self._device)

    def seat(self, owner: Sequence[int]) -> None:
        """Say which prompt each of B rows goes on from; all prompts have been run."""
        self._laid, self._blocks = None, {}
        self._owner = np.asarray(owner, dtype=np.int64)
        self._seats = self._seated()

    def step(self) -> None:
        """Get ready for a pass over the next token of every row."""
        self._steps += 1

    def keep(self, order: Sequence[int]) -> None:
        """Leave all rows but `order`, in that order; of what stays, only rows that change their place are copied."""
        moved = [place for place, row in enumerate(order) if place != row]
        to = torch.tensor(moved, dtype=torch.int64, device=self._device)
        source = torch.tensor([order[place] for place in moved], dtype=torch.int64, device=self._device)
        for kept in self._layers.values():
            kept.blocks = [
                (_moved(keys, to, source, len(order)), _moved(values, to, source, len(order)))
                for keys, values in kept.blocks
            ]
        self._owner = self._owner[list(order)]
        live = np.unique(self._owner)
        if 2 * len(live) <= len(self._lengths):  # so each prompt is copied less than twice in all
            self._drop_prompts(live)
        self._seats = self._seated()

    def _drop_prompts(self, live: Ints) -> None:
        chosen = torch.from_numpy(live).to(self._device)
        self._lengths = self._lengths[live]
        self._owner = np.searchsorted(live, self._owner)
        # Shorter prompts may be left: their padding goes.
        surplus = self._width - int(self._lengths.max())
        self._width -= surplus
        for kept in self._layers.values():
            kept.keys = kept.keys[chosen][:, :, surplus:].contiguous()
            kept.values = kept.values[chosen][:, :, surplus:].contiguous()

    def _seated(self) -> _Seats:
        owner = self._owner
        counts = np.bincount(owner, minlength=len(self._lengths))
        order = np.argsort(owner, kind="stable")
        place = np.empty_like(owner)
        place[order] = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.zeros((len(counts), counts.max()), dtype=np.int64)
        rows[owner, place] = np.arange(len(owner))
        even = len(owner) == rows.size and bool((order == np.arange(len(owner))).all())
        mask = None
        if (self._lengths != self._width).any():
            padding = np.arange(self._width) < (self._width - self._lengths[owner])[:, None]
            mask = torch.zeros(padding.shape).masked_fill(torch.from_numpy(padding), -torch.inf)
            mask = mask[:, None, None].to(self._device)
        by_prompt, prompt, number = (torch.from_numpy(array).to(self._device) for array in (rows, owner.copy(), place))
        return _Seats(by_prompt, prompt, number, even, mask)

    # ------------------------------------------------------------ the attention

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Return the attention output [T, Hq, E]."""
        kind = query.device.type
        if not torch.is_autocast_enabled(kind):
            return self._attend(layer, query.to(value.dtype), key.to(value.dtype), value, rule)
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            return self._attend(layer, query.to(dtype), key.to(dtype), value.to(dtype), rule)

    def _attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        kept = self._layers.get(id(layer))
        if self._laid is None:
            if kept is None or kept.steps != self._steps - 1:
                raise _run_twice(layer)
            self._put(kept, key.transpose(0, 1), value.transpose(0, 1))
            return self._decode(kept, query, rule)
        if kept is None:
            size = (len(self._lengths), len(key), self._width)
            kept = _Kept(key.new_zeros(*size, key.shape[-1]), value.new_zeros(*size, value.shape[-1]))
            self._layers[id(layer)] = kept
        if kept.filled != self._part.start:
            raise _run_twice(layer)
        kept.filled = self._part.stop
        kept.keys[self._part] = key[:, self._index].transpose(0, 1)
        kept.values[self._part] = value[:, self._index].transpose(0, 1)
        if rule.window not in self._blocks:
            self._blocks[rule.window] = self._laid.blocks(rule.window, self._device)
        return tree_attention(query, key, value, self._blocks[rule.window], rule)

    def _put(self, kept: _Kept, key: Tensor, value: Tensor) -> None:
        """Append one token of every row, [B, Hk, D] and [B, Hk, E], to the rows' own."""
        at = kept.steps % BLOCK
        if at == 0:
            size = (*key.shape[:2], min(BLOCK, self._limit - kept.steps))
            kept.blocks.append((key.new_empty(*size, key.shape[-1]), value.new_empty(*size, value.shape[-1])))
        keys, values = kept.blocks[-1]
        keys[:, :, at] = key
        values[:, :, at] = value
        kept.steps += 1

    def _decode(self, kept: _Kept, query: Tensor, rule: Rule) -> Tensor:
        """Return [B, Hq, E]: one softmax over the prompt's keys, the row's own, and what sinks take."""
        seats = self._seats
        assert seats is not None
        heads, rows = kept.keys.shape[1], query.shape[1]
        q = (query.transpose(0, 1) * rule.scale).contiguous().view(rows, heads, -1, query.shape[-1])
        window = rule.window
        own = _blocks_in(kept, window)
        begin = 0 if window is None else max(0, self._width + kept.steps - window)  # the first prompt column in reach
        at = max(0, self._width - begin)
        parts = []
        if at:
            parts.append(_from_prompts(_to_prompts(q, seats), kept.keys[:, :, begin:].transpose(2, 3), seats, rows))
        flat = q.view(rows * heads, *q.shape[2:])
        parts += [torch.bmm(flat, keys.transpose(1, 2)).view(*q.shape[:3], -1) for keys, _ in own]
        mask = None if seats.mask is None or not at else seats.mask[..., begin:]
        probabilities = _softmax(parts, rule, mask).to(q.dtype)
        out = None
        if at:
            out = _from_prompts(_to_prompts(probabilities[..., :at], seats), kept.values[:, :, begin:], seats, rows)
            out = out.reshape(rows * heads, q.shape[2], -1)
        shares = probabilities.view(rows * heads, q.shape[2], -1)
        for _, values in own:
            end = at + values.shape[1]
            part = torch.bmm(shares[..., at:end], values)
            out, at = part if out is None else out.add_(part), end
        assert out is not None  # a row attends at least to the token that it runs
        return out.view(rows, query.shape[0], -1)


def _run_twice(layer: nn.Module) -> ModelError:
    return ModelError(
        f"{type(layer).__name__}: expected every attention layer to run once in each pass, found one that does not",
        hint="such a model can be scored and trained; sample from it by a policy of your own (ramet.Policy)",
    )


def _moved(block: Tensor, to: Tensor, source: Tensor, count: int) -> Tensor:
    """Move rows in place and return the first `count`, in a storage of their own once most of the rows have left."""
    if len(to):
        block[to] = block[source]
    left = block[:count]
    return left.clone() if 2 * left.numel() * left.element_size() <= block.untyped_storage().nbytes() else left


def _blocks_in(kept: _Kept, window: int | None) -> list[tuple[Tensor, Tensor]]:
    """Return the rows' own keys and values [B * Hk, n, ...] that their last tokens are near enough to, as views."""
    first = 0 if window is None else max(0, kept.steps - window)
    found = []
    for number, (keys, values) in enumerate(kept.blocks):
        begin, end = max(0, first - number * BLOCK), min(kept.steps - number * BLOCK, BLOCK)
        if begin < end:
            found.append((keys[:, :, begin:end].flatten(0, 1), values[:, :, begin:end].flatten(0, 1)))
    return found


def _to_prompts(tensor: Tensor, seats: _Seats) -> Tensor:
    """Lay [B, Hk, R, n] out by prompt: [P * Hk, G * R, n]."""
    prompts, most = seats.rows.shape
    _, heads, shared, width = tensor.shape
    by_prompt = tensor.view(prompts, most, heads, shared, width) if seats.even else tensor[seats.rows]
    return by_prompt.transpose(1, 2).reshape(prompts * heads, most * shared, width)


def _from_prompts(by_prompt: Tensor, with_keys: Tensor, seats: _Seats, rows: int) -> Tensor:
    """Multiply [P * Hk, G * R, n] with [P, Hk, n, m], and lay the product out by row: [B, Hk, R, m]."""
    prompts, most = seats.rows.shape
    heads = with_keys.shape[1]
    product = torch.bmm(by_prompt, with_keys.flatten(0, 1))
    product = product.view(prompts, heads, most, -1, product.shape[-1]).transpose(1, 2)
    return product.reshape(rows, heads, *product.shape[3:]) if seats.even else product[seats.prompt, seats.place]


def _softmax(parts: list[Tensor], rule: Rule, mask: Tensor | None) -> Tensor:
    """Return the probabilities [B, Hk, R, n] of the scores in `parts`; `mask` is added to the first of its columns."""
    scores = torch.cat(parts, -1)
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None:
        scores[..., : mask.shape[-1]] += mask
    if rule.sinks is None:
        return scores.softmax(-1)
    rows, heads, shared, width = scores.shape
    nothing = rule.sinks.to(scores).view(1, heads, shared, 1).expand(rows, -1, -1, -1)
    return torch.cat([scores, nothing], -1).softmax(-1)[..., :width]
