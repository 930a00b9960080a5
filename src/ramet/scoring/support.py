"""The rule by which tokens are cut from a distribution: one for the sampler and for the scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ramet.types import Support

HEAD = 256
"""How many of the largest logits are tried first for a row's top-p, before more and then all: changes no result."""
TIED_ROWS = 64
"""How many rows with ties across their edge are looked at together: bounds memory, changes no result."""


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
        tied = torch.nonzero(self.last < len(ids) - 1).squeeze(1)
        if len(tied):  # few rows, as a rule none
            kept[tied] *= (scaled[tied] > self.value[tied, None]) | (ids <= self.last[tied, None])
        return kept


def scaled_logits(logits: Tensor, temperatures: Tensor | None) -> Tensor:
    """Return `logits` [M, V] in float32 or better, divided by `temperatures` [M] or [1] (None: by 1).

    Sampler and scorer both scale here, so that equal logits stay equal to the last bit.
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    return scaled if temperatures is None else scaled / temperatures.to(scaled.dtype)[:, None]


@torch.no_grad()
def edge_of(scaled: Tensor, cuts: Cuts) -> Edge:
    """Find where each row of scaled logits [M, V] is cut."""
    rows, vocabulary = scaled.shape
    value = scaled.new_full((rows,), -torch.inf)
    last = torch.full((rows,), vocabulary - 1, device=scaled.device)
    if cuts.widest or cuts.by_mass:
        top_k = cuts.top_k.clamp(max=vocabulary).expand(rows)
        top_p = cuts.top_p.expand(rows)
        cut = torch.nonzero((top_k < vocabulary) | (top_p < 1)).squeeze(1)
        # One more than is kept tells whether the edge lies between equals.
        width = max(cuts.widest + 1, HEAD if cuts.by_mass else 0)
        if len(cut) == rows:
            value, last = _edge_by_rank(scaled, top_k, top_p, width)
        elif len(cut):
            value[cut], last[cut] = _edge_by_rank(scaled[cut], top_k[cut], top_p[cut], width)
    if cuts.by_ratio:
        floor = scaled.amax(-1) + cuts.min_p.log().to(scaled.dtype)
        higher = floor > value
        value, last = torch.where(higher, floor, value), torch.where(higher, vocabulary - 1, last)
    return Edge(value, last)


def _edge_by_rank(scaled: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cut by top-k and top-p, looking at the `width` largest logits, and at more in the rows where they do not do."""
    rows, vocabulary = scaled.shape
    width = min(width, vocabulary)
    largest = scaled.sort(-1, descending=True).values if width == vocabulary else scaled.topk(width).values
    count = _kept(largest, scaled, top_k, top_p)
    value = largest.gather(-1, count[:, None] - 1).squeeze(-1)
    below = largest.gather(-1, count[:, None].clamp(max=width - 1)).squeeze(-1)
    last = torch.full((rows,), vocabulary - 1, device=scaled.device)
    tied = torch.nonzero((count < width) & (below == value)).squeeze(1)
    for some in torch.split(tied, TIED_ROWS):
        equal = scaled[some] == value[some, None]
        needed = count[some] - (largest[some] > value[some, None]).sum(-1)
        ranks = equal.cumsum(-1, dtype=torch.int32)
        last[some] = torch.searchsorted(ranks, needed[:, None].int()).squeeze(-1)
    wide = torch.nonzero(count == width).squeeze(1)
    if width < vocabulary and len(wide):
        value[wide], last[wide] = _edge_by_rank(scaled[wide], top_k[wide], top_p[wide], 16 * width)
    return value, last


def _kept(largest: Tensor, scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return how many tokens each row keeps, int64 [M]: the width of `largest` where it may be more."""
    width = largest.shape[-1]
    count = top_k.clamp(max=width)
    if not bool((top_p < 1).any()):
        return count
    # Summed in float64 from the most probable on: no edge moves with the width, which is the batch's.
    weights = (largest - largest[:, :1]).double().exp()
    weights = weights.masked_fill(torch.arange(width, device=scaled.device) >= top_k[:, None], 0.0)
    reached = weights.cumsum(-1)
    whole = (scaled - largest[:, :1]).exp().sum(-1, dtype=torch.float64)
    total = torch.where(top_k < scaled.shape[-1], reached[:, -1], whole)
    by_mass = 1 + (reached < (top_p * total)[:, None]).sum(-1)
    return torch.where(top_p < 1, torch.minimum(by_mass, count), count)
