"""Rows in the order of their loader, each as often as it is repeated, dealt out in any numbers.

Rows are kept in blocks: what one item of the loader gave, or single rows that were read one after the other.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from ramet.errors import DataError
from ramet.ragged import Ragged
from ramet.transforms.loading.columns import Parts, cut
from ramet.transforms.loading.items import Reader, Values
from ramet.transforms.loading.sources import Epoch, Source

Fit: TypeAlias = Callable[[Values | list[Values], Iterator[Values]], Parts]
"""Makes the columns of a block: of those of a batch, or of single rows; the items that follow may be looked at."""
_FURTHER = 64  # how many items are looked at at most, to see what a column holds


@dataclass(slots=True, eq=False)
class Block:
    """Rows, by column. `items` with epoch and number: one that is a `batch`, else one for each row."""

    parts: Parts
    size: int
    items: list[tuple[Any, Epoch, int]]
    batch: bool

    def place(self, row: int) -> tuple[Epoch, int, int]:
        """Return where a row came from: epoch, number of the item, and number of the row in it."""
        _, epoch, index = self.items[0 if self.batch else row]
        return epoch, index, row if self.batch else 0

    def digest(self, row: int) -> str:
        """Return a fingerprint of a row: of its text and its tensors."""
        digest = hashlib.sha256()
        for key, part in cut(self.parts, row, row + 1).items():
            value = part.rows()[0] if isinstance(part, Ragged) else part[0]
            if isinstance(value, Tensor) and not value.is_nested:
                content = value.detach().flatten()
                digest.update(f"{key}{tuple(value.shape)}{content.tolist()}".encode())
            elif isinstance(value, str):
                digest.update(f"{key}{value}".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


class Stream:
    """Rows, read ahead no further than what is asked for.

    Nothing is dealt before all that is asked for is there: so an error of the loader, whenever it comes, loses no row.
    `dealt` counts the rows dealt, repeats included.
    """

    def __init__(self, source: Source, reader: Callable[[], Reader], fit: Fit, repeats: int) -> None:
        self.source, self.repeats = source, repeats
        self._reader, self._fit = reader, fit
        self._barren: int | None = None  # the epoch since which no item had a row
        self._clear(0)

    def _clear(self, dealt: int) -> None:
        self.dealt = dealt
        self._ahead: deque[Block] = deque()
        self._gone = 0  # how many rows of the first block have been dealt
        self._there = 0  # how many rows have been read and not dealt
        self._waiting: list[tuple[Any, Epoch, int]] = []  # items that are not read yet, or could not be
        self._last: Block | None = None
        self._taken: tuple[int, int, int, Block | None, tuple[Block, ...]] | None = None

    def peek(self) -> Block:
        """Return the block of the row that is dealt next."""
        while not self._ahead:
            self._pull(1)
        return self._ahead[0]

    @property
    def numbered(self) -> int:
        """The number of the row that is read next."""
        return self.dealt // self.repeats + self._there

    def look(self, count: int) -> list[Parts]:
        """Return the rows that the next `count`, with repeats, are of; they are dealt by `take`."""
        rows = -(-(self.dealt % self.repeats + count) // self.repeats)
        while not self._ahead or self._there < rows:
            self._pull(max(rows - self._there, 1))
        found, start = [], self._gone
        for block in self._ahead:
            end = min(block.size, start + rows)
            found.append(cut(block.parts, start, end) if end - start < block.size else block.parts)
            rows, start = rows - (end - start), 0
            if not rows:
                break
        return found

    def take(self, count: int) -> None:
        """Deal the next `count` rows, which `look` or `peek` has shown."""
        rows = (self.dealt % self.repeats + count) // self.repeats
        self._taken = (rows, self.dealt, self._gone, self._last, tuple(self._ahead))
        self.dealt += count
        self._pass(rows)

    def settle(self) -> None:
        """What was dealt last is in use."""
        self._taken = None

    def take_back(self) -> None:
        """Have what was dealt last again as what is dealt next, if it is not in use."""
        if self._taken is not None:
            rows, self.dealt, self._gone, self._last, before = self._taken
            passed = [block for block in before if all(block is not other for other in self._ahead)]
            self._ahead.extendleft(reversed(passed))
            self._there += rows
            self._taken = None

    def _pass(self, rows: int) -> None:
        self._gone += rows
        self._there -= rows
        while self._ahead and self._gone >= self._ahead[0].size:
            self._last = self._ahead.popleft()
            self._gone -= self._last.size

    def start_over(self) -> None:
        """Begin the next epoch at its first row; what was read ahead comes again in its place."""
        if not self.dealt and not self._waiting:
            return
        self.source.restart()
        self._clear(-(-self.dealt // self.repeats) * self.repeats)

    def seed(self, seed: int) -> None:
        """Seed the order of a loader that has its own: of this epoch if no row was dealt, else of the next."""
        if self.source.seed(seed) and not self.dealt:
            self.source.restart()
            self._clear(0)

    def state(self) -> dict[str, Any]:
        """Return where the next row stands, in numbers and the states of the loader's generators."""
        self.source.refuse_state()
        past = self._last is not None and not self._ahead
        block = self._last if self._last is not None and past else self.peek()
        row = block.size - 1 if past else self._gone
        epoch, index, offset = block.place(row)
        place = {
            "epoch": epoch.number,
            "generators": list(epoch.states),
            "seed_after": epoch.seed_after,
            "index": index,
            "offset": offset,
            "print": block.digest(row),
        }
        return {"dealt": self.dealt, "row": place, "past": past}

    def load(self, state: dict[str, Any]) -> None:
        """Go to where the state was saved. DataError, and all as before, if the loader has another row there."""
        self.source.refuse_state()
        before, source = vars(self).copy(), self.source.before()
        try:
            self._load(state)
        except BaseException:
            vars(self).update(before)
            vars(self.source).update(source)
            self.source.seek(self.source.epoch, self.source.index)
            raise

    def _load(self, state: dict[str, Any]) -> None:
        place = state["row"]
        index, offset = place["index"], place["offset"]
        self.source.seek(Epoch(place["epoch"], tuple(place["generators"]), place["seed_after"]), index)
        self._clear(state["dealt"])
        self.source.replay()
        self._pull(1)
        block = self._ahead[0] if self._ahead else None
        if (
            block is None
            or offset >= block.size
            or block.place(offset)[1:] != (index, offset)
            or block.digest(offset) != place["print"]
        ):
            raise DataError(
                f"{self.source.name} has another row {offset} in item {index} of epoch {place['epoch']} than when the "
                "state was saved",
                hint="resume over the same data in the same order: a loader that shuffles needs a generator of its own",
            )
        self._pass(offset + state["past"])

    def read_again(self) -> None:
        """Read what was read ahead once more, when it is needed: by now it may be read in another way."""
        items = [item for block in self._ahead for item in block.items]
        if self._ahead and not self._ahead[0].batch:
            items, self._gone = items[self._gone :], 0
        self._waiting = items + self._waiting
        self._there = -self._gone
        self._ahead.clear()

    def _pull(self, most: int) -> None:
        """Read on: a batch, or up to `most` items that are single rows. What is refused stays the next."""
        rows: list[Values] = []
        source, waiting, read = self.source, self._waiting, self._reader().read
        for number in range(most):
            if number == len(waiting):
                item = source.next()
                waiting.append((item, source.epoch, source.index - 1))
            try:
                columns, size = read(waiting[number][0])
            except DataError as error:
                name = f"row {self.numbered + number} of {source.name}"
                raise DataError(f"{name}: {error.message}", hint=error.hint) from None
            if size is not None:
                break
            rows.append(columns)
        if rows:
            self._put(self._fit(rows, self._further(len(rows))), len(rows), False)
        elif size:
            self._put(self._fit(columns, self._further(1)), size, True)
        else:
            self._refuse_no_rows(self._waiting.pop(0)[1])

    def _further(self, number: int) -> Iterator[Values]:
        """Yield what the items after the first `number` that wait hold, as they are, in this epoch; they wait too."""
        waiting, read = self._waiting, self._reader().read
        for place in range(number, number + _FURTHER):
            try:
                if place == len(waiting):
                    item = self.source.next()
                    waiting.append((item, self.source.epoch, self.source.index - 1))
                if waiting[place][1].number != waiting[0][1].number:
                    return
                columns, size = read(waiting[place][0])
            except DataError:  # it is raised when the item is asked for
                return
            yield {key: [value] for key, value in columns.items()} if size is None else columns

    def _put(self, parts: Parts, size: int, batch: bool) -> None:
        count = 1 if batch else size
        self._ahead.append(Block(parts, size, self._waiting[:count], batch))
        self._there += size
        del self._waiting[:count]
        self._barren = None

    def _refuse_no_rows(self, epoch: Epoch) -> None:
        """Refuse a loader that gives items, and no row in any of them for a whole epoch."""
        if self._barren is None:
            self._barren = epoch.number
        elif epoch.number > self._barren + 1:
            raise DataError(f"{self.source.name} is empty: it gave 0 rows in epoch {epoch.number - 1}")
