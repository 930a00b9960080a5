"""The decoding loop, and the two ways of running a model in it: with shared keys, and with the model's own cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ramet.attention.registration import Attending
from ramet.attention.store import Prefixes, PrefixStore, in_passes
from ramet.errors import ModelError
from ramet.policies.draws import draw_tokens, uniforms
from ramet.policies.packed import PackedLinears
from ramet.policies.stops import StopWatch
from ramet.scoring.halves import Halves
from ramet.scoring.running import autocast_context, forward_parameters, one_thread
from ramet.scoring.support import Cuts
from ramet.types import Completion, Request, StopReason

PREFILL = 8192
"""How many distinct tokens of prompts run in one pass: bounds memory (a longer prompt goes alone)."""

NOTHING = -1
"""Stands where a row has fewer ids that end it than another: no token has this id."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request that is being answered: where it ends at the latest, and why, and what watches for its stop strings."""

    request: Request
    limit: int
    limit_reason: StopReason
    watch: StopWatch | None = None


class Steps(Protocol):
    """A model that goes on from prefixes, one token a row at a time; `computed` counts the tokens that it ran."""

    computed: int

    def first(self) -> Tensor:
        """Run the prefixes; return the logits [B, V] of what follows each row."""
        ...

    def next(self, tokens: Tensor) -> Tensor:
        """Run one token of each row, int64 [B]; return the logits [B, V] of what follows."""
        ...

    def keep(self, order: list[int]) -> None:
        """Go on with the rows `order` alone, in that order."""
        ...


# ---------------------------------------------------------------- the loop


class _State:
    """What the loop knows of the rows that go on: plain tensors, one entry a row, so that a step looks at none alone.

    `line` says which of all rows each is. `tokens` and `log_probs` [rows, steps] are of all rows, those that have ended
    included.
    """

    def __init__(self, rows: Sequence[Row], eos_ids: frozenset[int], device: torch.device) -> None:
        self.rows, self.device = rows, device
        steps = max(row.limit for row in rows)
        points = np.zeros((len(rows), steps))
        for number, row in enumerate(rows):
            points[number, : row.limit] = uniforms(row.request.draw, row.limit)
        ends = [sorted(eos_ids | set(row.request.sampling.stop_ids)) for row in rows]
        width = max(map(len, ends))
        padded = [ids + [NOTHING] * (width - len(ids)) for ids in ends]
        self.points = torch.from_numpy(points).to(device)
        self.ends = torch.tensor(padded, dtype=torch.int64, device=device).view(len(rows), width)
        self.limits = torch.tensor([row.limit for row in rows], device=device)
        self.temperatures = torch.tensor([row.request.sampling.temperature for row in rows], device=device)
        self.tokens = torch.zeros(len(rows), steps, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(len(rows), steps, device=device)
        self.seen: set[int] = set()  # rows in whose text a stop string stands
        self.take(list(range(len(rows))))

    def take(self, lines: list[int]) -> None:
        """Go on with these of all rows."""
        self.lines = lines
        self.line = torch.tensor(lines, dtype=torch.int64, device=self.device)
        self.cuts = Cuts.of([self.rows[line].request.sampling.support for line in lines], self.device)
        self.live_ends, self.live_limits = self.ends[self.line], self.limits[self.line]
        self.live_temperatures = self.temperatures[self.line]
        self.live_points = self.points[self.line]
        self.watched = [place for place, line in enumerate(lines) if self.rows[line].watch is not None]

    def draw(self, logits: Tensor, step: int) -> Tensor:
        """Draw each row's next token, int64 [B], and write it down."""
        tokens, log_probs = draw_tokens(logits, self.live_points[:, step], self.live_temperatures, self.cuts)
        self.tokens[self.line, step] = tokens
        self.log_probs[self.line, step] = log_probs
        return tokens

    def ended(self, tokens: Tensor, step: int) -> list[int]:
        """Return the places of the rows that end with the token that was drawn."""
        over = (tokens[:, None] == self.live_ends).any(-1) | (self.live_limits <= step + 1)
        places = torch.nonzero(over).flatten().tolist()
        if self.watched:
            said = tokens[self.watched].tolist()
            seen = [place for place, token in zip(self.watched, said, strict=True) if self._sees(place, token)]
            places = sorted({*places, *seen})
        return places

    def _sees(self, place: int, token: int) -> bool:
        line = self.lines[place]
        watch = self.rows[line].watch
        if watch is not None and watch.add(token):
            self.seen.add(line)
        return line in self.seen

    def completion(self, place: int, step: int, eos_ids: frozenset[int], version: int) -> Completion:
        """Return what the row at `place` has said up to `step`, which ended it."""
        line = self.lines[place]
        row = self.rows[line]
        tokens, log_probs = self.tokens[line, : step + 1].cpu(), self.log_probs[line, : step + 1].cpu()
        last = int(tokens[-1])
        if last in eos_ids:
            stop = StopReason.EOS
        elif last in row.request.sampling.stop_ids or line in self.seen:
            stop = StopReason.STOP
        else:
            stop = row.limit_reason
        return Completion(row.request.row, tokens.clone(), log_probs.clone(), stop, version)


@torch.no_grad()
def decode(
    steps: Steps, rows: Sequence[Row], eos_ids: frozenset[int], version: int, count: Callable[[int], None]
) -> Iterator[Completion]:
    """Draw tokens until every row has ended; yield completions as they end. `count` is told how many tokens were run.

    A row's uniforms are a function of its address and its step alone.
    """
    logits = steps.first()
    count(steps.computed)
    state = _State(rows, eos_ids, logits.device)
    step = 0
    while True:
        tokens = state.draw(logits, step)
        ended = state.ended(tokens, step)
        if ended:
            done = [state.completion(place, step, eos_ids, version) for place in ended]
            order = filled(len(tokens), ended)
            if order:
                state.take([state.lines[place] for place in order])
                steps.keep(order)
                tokens = tokens[order]
            yield from done
            if not order:
                return
        before = steps.computed
        logits = steps.next(tokens)
        count(steps.computed - before)
        step += 1


def filled(rows: int, ended: Sequence[int]) -> list[int]:
    """Return the places that stay, each at its own place or, for the last ones, at that of a row that ended.

    >>> filled(6, [1, 4])
    [0, 5, 2, 3]
    """
    gone = set(ended)
    count = rows - len(gone)
    last = iter([place for place in range(count, rows) if place not in gone])
    return [next(last) if place in gone else place for place in range(count)]


# ---------------------------------------------------------------- shared keys


class SharedSteps:
    """A model's steps with each distinct prompt's keys kept once; for models that are right under the flat engine.

    `owner` says which of `prompts` each row goes on from; no row runs more than `limit` tokens of its own. `packed`
    are the linear layers of the steps after the first, None for the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Tensor],
        owner: Sequence[int],
        limit: int,
        *,
        autocast: torch.dtype | None = None,
        packed: PackedLinears | None = None,
    ) -> None:
        self._device = next(model.parameters()).device
        self._model, self._halves = model, Halves(model)
        lengths = [len(prompt) for prompt in prompts]
        self._store = PrefixStore(lengths, limit, self._device)
        self._attending = Attending(model, self._store)
        self._prompts, self._owner = prompts, list(owner)
        self._autocast, self._packed = autocast, packed
        self._positions = torch.tensor([lengths[number] for number in owner], device=self._device)
        self.computed = 0

    @torch.inference_mode()  # nothing is recorded, not even that nothing is: a step is mostly small operations
    def first(self) -> Tensor:
        """Run the prompts, as many at once as `PREFILL` allows."""
        hidden = []
        for part in in_passes(self._prompts, PREFILL):
            laid = Prefixes.of(self._prompts[part])
            self._store.prefill(laid, part.start)
            with one_thread(self._model), self._attending, autocast_context(self._device, self._autocast):
                positions = torch.from_numpy(laid.layout.positions).to(self._device)
                found = self._halves.body(laid.tokens[None].to(self._device), positions[None])[0]
            hidden.append(found[[int(path[-1]) for path in laid.paths]])
            self.computed += len(laid.tokens)
        self._store.seat(self._owner)
        with one_thread(self._model), autocast_context(self._device, self._autocast):
            logits = self._halves.head(torch.cat(hidden))
        return logits[torch.tensor(self._owner, device=self._device)]

    @torch.inference_mode()
    def next(self, tokens: Tensor) -> Tensor:
        """Run one token of each row, as one row of B tokens at positions of their own."""
        self._store.step()
        packed = contextlib.nullcontext() if self._packed is None else self._packed
        with one_thread(self._model), packed, autocast_context(self._device, self._autocast):
            with self._attending:
                hidden = self._halves.body(tokens[None], self._positions[None])[0]
            logits = self._halves.head(hidden)
        self._positions = self._positions + 1
        self.computed += len(tokens)
        return logits

    @torch.inference_mode()
    def keep(self, order: list[int]) -> None:
        """Drop the own keys of rows that ended."""
        self._store.keep(order)
        self._positions = self._positions[order]


# ---------------------------------------------------------------- the model's own cache


class CachedSteps:
    """A model's steps with the cache that comes with it, from `prompts` [P, L] of one length, so without any padding.

    It is right for recurrent layers, which padding would pass through, and for biases by distance. `owner` says which
    prompt each row goes on from. Raises `ModelError` for a model whose forward pass takes no cache.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Tensor,
        owner: Sequence[int],
        *,
        autocast: torch.dtype | None = None,
        packed: PackedLinears | None = None,
    ) -> None:
        from transformers import DynamicCache

        self._model: Any = model
        config: Any = model.config
        self._known = forward_parameters(model)
        names = [name for name in ("cache", "past_key_values") if name in self._known]  # as the version has it
        if not names:
            raise ModelError(f"{type(model).__name__} can not generate step by step: its forward pass takes no cache")
        self._keyword = names[0]
        self._device = next(model.parameters()).device
        self._cache: Any = DynamicCache(config=config)
        self._prompts, self._owner = prompts, list(owner)
        self._length = 0
        self._autocast, self._packed = autocast, packed
        self.computed = 0

    def first(self) -> Tensor:
        """Run each prompt once and hand its cache to all its rows."""
        logits = self._run(self._prompts.to(self._device))
        rows = torch.tensor(self._owner, device=self._device)
        if self._owner != list(range(len(self._prompts))):
            self._cache.reorder_cache(rows)
        return logits[rows]

    def next(self, tokens: Tensor) -> Tensor:
        """Run one token of each row."""
        with contextlib.nullcontext() if self._packed is None else self._packed:
            return self._run(tokens[:, None])

    def keep(self, order: list[int]) -> None:
        """Drop the rows that ended from the cache."""
        self._cache.reorder_cache(torch.tensor(order, device=self._device))

    def _run(self, ids: Tensor) -> Tensor:
        options: dict[str, Any] = {self._keyword: self._cache}
        if "position_ids" in self._known:
            positions = torch.arange(self._length, self._length + ids.shape[1], device=self._device)
            options["position_ids"] = positions.expand_as(ids)
        if "logits_to_keep" in self._known:
            options["logits_to_keep"] = 1
        with one_thread(self._model), autocast_context(self._device, self._autocast):
            logits: Tensor = self._model(input_ids=ids, use_cache=True, **options).logits[:, -1]
        self._length += ids.shape[1]
        self.computed += ids.numel()
        return logits
