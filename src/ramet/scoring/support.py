"""The rule by which tokens are cut from a distribution: one for the sampler and for the scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ramet.types import Support

NARROW = 2048
"""Up to which top-k a row's largest logits are picked out, and the edge found among them: changes no result."""
BUCKETS = 2048
"""How many ranges of logits are told apart in one pass of the search for an edge: changes no result."""
TIED_ROWS = 64
"""How many rows with ties across their edge are looked at together: bounds memory, changes no result."""
SEARCHED_ROWS = 64
"""How many rows are searched for their edge in one go on a GPU: bounds memory, changes no result."""
SEARCHED = 2**18
"""How many logits are searched in one go on a CPU: few enough to stay in its cache, changes no result."""
NEVER = 1e4
"""How far below the largest a logit has no probability at all, in float64 as in float32."""
NO_MASS = 50.0
"""How far below the largest a logit has no mass in the units of `_unit`."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The supports of many rows as tensors [M], or of one for all rows [1]; `top_k` is V or more where it cuts nothing.

    `widest` is the largest `top_k` that cuts (0: none does); `by_mass` and `by_ratio` say whether any row has a `top_p`
    or `min_p`.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    widest: int
    by_mass: bool
    by_ratio: bool

    @classmethod
    def of(cls, supports: Sequence[Support], device: torch.device | None = None) -> Cuts | None:
        """Collect the supports of rows; None where none of them cuts anything.

        >>> Cuts.of([Support(), Support()]) is None
        True
        """
        if all(support.whole for support in supports):
            return None
        ranks = [2**62 if support.top_k is None else support.top_k for support in supports]
        return cls(
            torch.tensor(ranks, dtype=torch.int64, device=device),
            torch.tensor([support.top_p for support in supports], dtype=torch.float64, device=device),
            torch.tensor([support.min_p for support in supports], dtype=torch.float64, device=device),
            max([support.top_k for support in supports if support.top_k is not None], default=0),
            any(support.top_p < 1 for support in supports),
            any(support.min_p > 0 for support in supports),
        )


@dataclass(frozen=True, slots=True)
class Edge:
    """The last token [M] that is kept in each row: more probable ones are kept, and its equals up to the id `last`."""

    value: Tensor
    last: Tensor

    @torch.no_grad()
    def kept(self, scaled: Tensor) -> Tensor:
        """Return 1 for each token that is kept and 0 for the others, [M, V], given the logits that were looked at.

        >>> scaled = torch.tensor([[0.0, 2.0, 1.0, 1.0]])
        >>> cuts = Cuts.of([Support(top_k=2)])
        >>> edge_of(scaled, cuts).kept(scaled).tolist()
        [[0.0, 1.0, 1.0, 0.0]]
        """
        # Numbers in place of truth values: they are made faster, and weights are multiplied with them.
        kept = torch.ge(scaled, self.value[:, None], out=torch.empty_like(scaled))
        ids = torch.arange(scaled.shape[-1], device=scaled.device)
        if bool((self.last < len(ids) - 1).any()):
            above = torch.gt(scaled, self.value[:, None], out=torch.empty_like(scaled))
            kept = torch.where(ids <= self.last[:, None], kept, above)
        return kept


def scaled_logits(logits: Tensor, temperatures: Tensor | None) -> Tensor:
    """Return `logits` [M, V] in float32 or better, divided by `temperatures` [M] or [1] (None: by 1).

    Sampler and scorer both scale here, so that equal logits stay equal to the last bit.
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    return scaled if temperatures is None else scaled / temperatures.to(scaled.dtype)[:, None]


@torch.no_grad()
def edge_of(scaled: Tensor, cuts: Cuts) -> Edge:
    """Find where each row of scaled logits [M, V] is cut.

    Probabilities are added up as whole numbers, in units of at most V / 2**61 of the row's largest. Such sums are
    exact in any order: a row has the same edge, to the last bit, alone, in any batch, on one thread or on many. A row
    that is no distribution (NaN, +inf, nothing but -inf) is not cut by top-k and top-p.
    """
    rows, vocabulary = scaled.shape
    value = scaled.new_full((rows,), -torch.inf)
    last = torch.full((rows,), vocabulary - 1, device=scaled.device)
    largest = scaled.amax(-1)
    if cuts.widest or cuts.by_mass:
        top_k = cuts.top_k.clamp(max=vocabulary).expand(rows)
        top_p = cuts.top_p.expand(rows)
        cut = largest.isfinite() & ((top_k < vocabulary) | (top_p < 1))
        narrow = top_k <= min(NARROW, vocabulary - 1)
        for find, chosen in ((_edge_among_few, cut & narrow), (_edge_among_all, cut & ~narrow)):
            some = torch.nonzero(chosen).squeeze(1)
            if len(some):
                part = scaled if len(some) == rows else scaled[some]
                value[some], last[some] = find(part, top_k[some], top_p[some])
    if cuts.by_ratio:
        floor = largest + cuts.min_p.log().to(scaled.dtype)
        higher = floor > value
        value, last = torch.where(higher, floor, value), torch.where(higher, vocabulary - 1, last)
    return Edge(value, last)


def _edge_among_few(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Cut by a small top-k, and by top-p among what it keeps: sort that much, and add it up."""
    rows, vocabulary = scaled.shape
    # One more than is kept tells whether the edge lies between equals.
    width = min(int(top_k.max()) + 1, vocabulary)
    largest = scaled.topk(width).values
    masses = (largest - largest[:, :1]).exp_().mul_(_unit(vocabulary)).long()
    reached = masses.masked_fill_(torch.arange(width, device=scaled.device) >= top_k[:, None], 0).cumsum(-1)
    by_mass = 1 + torch.searchsorted(reached, _share(top_p, reached[:, -1])[:, None]).squeeze(-1)
    count = torch.where(top_p < 1, by_mass, top_k)
    value = largest.gather(-1, count[:, None] - 1).squeeze(-1)
    below = largest.gather(-1, count[:, None].clamp(max=width - 1)).squeeze(-1)
    last = torch.full((rows,), vocabulary - 1, device=scaled.device)
    for some in torch.split(torch.nonzero((count < width) & (below == value)).squeeze(1), TIED_ROWS):
        equal = scaled[some] == value[some, None]
        needed = count[some] - (largest[some] > value[some, None]).sum(-1)
        ranks = equal.cumsum(-1, dtype=torch.int32)
        last[some] = torch.searchsorted(ranks, needed[:, None].int()).squeeze(-1)
    return value, last


def _edge_among_all(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Cut by a large top-k or none, and by top-p among what it keeps: count and add up everything, and sort nothing."""
    rows, vocabulary = scaled.shape
    step = min(rows, max(SEARCHED_ROWS if scaled.is_cuda else 1, SEARCHED // vocabulary))
    # One place for all: memory that was just written to is in the cache, and memory that is new is not.
    floats = scaled.new_empty(step, vocabulary)
    masses, buckets = torch.empty(2, step, vocabulary, dtype=torch.int64, device=scaled.device)
    found = []
    for first in range(0, rows, step):
        span = slice(first, min(first + step, rows))
        places = (place[: span.stop - first] for place in (floats, masses, buckets))
        found.append(_edge_in(scaled[span], top_k[span], top_p[span], *places))
    return torch.cat([value for value, _ in found]), torch.cat([last for _, last in found])


def _edge_in(
    scaled: Tensor, top_k: Tensor, top_p: Tensor, floats: Tensor, masses: Tensor, buckets: Tensor
) -> tuple[Tensor, Tensor]:
    """Do what `_edge_among_all` does, in three places [M, V] that are written over; the last two are int64."""
    rows, vocabulary = scaled.shape
    largest = scaled.amax(-1, keepdim=True)
    value = scaled.new_full((rows,), -torch.inf)
    last = torch.full((rows,), vocabulary - 1, device=scaled.device)
    deep = bool((top_k < vocabulary).any())
    if deep:
        # Strictly below the largest where that is too large for the difference to show.
        least = torch.minimum(largest - NEVER, torch.nextafter(largest, torch.full_like(largest, -torch.inf)))
        least = least.clamp(min=torch.finfo(least.dtype).min)
        value, last = _where_reached(torch.maximum(scaled, least), masses.fill_(1), top_k, NEVER, floats, buckets)
        value = value.masked_fill(value == least.squeeze(-1), -torch.inf)
        last = last.masked_fill(value == -torch.inf, vocabulary - 1)
    if not bool((top_p < 1).any()):
        return value, last
    weights = torch.sub(scaled, largest, out=floats).exp_()
    if deep:
        weights *= Edge(value, last).kept(scaled)
    masses.copy_(weights.mul_(_unit(vocabulary)))
    share = _share(top_p, masses.sum(-1))
    by_mass, last_by_mass = _where_reached(scaled, masses, share, NO_MASS, floats, buckets)
    return torch.where(top_p < 1, by_mass, value), torch.where(top_p < 1, last_by_mass, last)


def _unit(vocabulary: int) -> float:
    """Return how many units of mass the most probable token has: as many as V of them can be added up of in int64."""
    return 2.0 ** (62 - vocabulary.bit_length())


def _share(top_p: Tensor, total: Tensor) -> Tensor:
    """Return the least whole mass, int64 [M], that is `top_p` of the `total`."""
    return torch.minimum((top_p * total).ceil().long(), total)


def _where_reached(
    values: Tensor, masses: Tensor, target: Tensor, furthest: float, floats: Tensor | None, buckets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the token at which masses int64 [M, V], added up from the largest of `values` [M, V] on, reach `target`.

    The token is given by its value and, where not all of its equals are needed, by its id; otherwise by the largest id.
    Equals have equal masses, those with the highest ids perhaps none; the target, int64 [M], is above 0, at most the
    sum, and reached less than `furthest` below the largest value. The values are put into buckets by size, and the
    search goes on in the one where the target is reached, until all in it are equal: each pass divides the range of
    values by the number of buckets. `floats` and `buckets` are places [M, V] for the first pass.
    """
    vocabulary = values.shape[-1]
    ids = torch.arange(vocabulary, device=values.device).expand_as(values)
    while True:
        high = values.amax(-1, keepdim=True)
        span = (high - values.amin(-1, keepdim=True)).clamp_(max=furthest)
        if not bool((span > 0).any()):
            break
        # A division of two differences, and never by 0: it neither overflows nor loses the smallest numbers.
        depth = torch.sub(high, values, out=floats).div_(span.masked_fill(span == 0, 1.0))
        depth.mul_(BUCKETS - 1).clamp_(max=BUCKETS - 1)
        bucket = depth.long() if buckets is None else buckets.copy_(depth)
        sums = masses.new_zeros(len(masses), BUCKETS).scatter_add_(-1, bucket, masses).cumsum_(-1)
        reached = torch.searchsorted(sums, target[:, None])
        target = target - torch.where(reached > 0, sums.gather(-1, (reached - 1).clamp_min(0)), 0).squeeze(-1)
        row, column = torch.nonzero(bucket == reached, as_tuple=True)
        count = torch.bincount(row, minlength=len(target))
        first = count.cumsum(0) - count
        slot = torch.arange(len(row), device=row.device) - first[row]
        # Shorter rows are filled up with their first token again, without a mass.
        chosen = column[first][:, None].repeat(1, int(count.max()))
        chosen[row, slot] = column
        added = torch.zeros_like(chosen)
        added[row, slot] = masses[row, column]
        values, masses, ids = values.gather(-1, chosen), added, ids.gather(-1, chosen)
        floats = buckets = None
    each = masses.amax(-1)
    needed = (target + each - 1) // each
    last = ids.gather(-1, needed[:, None] - 1).squeeze(-1)
    equals = 1 + (ids > ids[:, :1]).sum(-1)
    return values[:, 0], torch.where(needed < equals, last, vocabulary - 1)
