"""The hash of a prefix is a fold: it starts from a keyed constant and absorbs one token at a time.

    h_0 = initial(module)        h_{t+1} = module of the pair (h_t, token)

So the same prefix has the same hash however it was reached: given at once or token by token, alone or in a batch, as
int32 or int64, in every process and on every machine. Equal hashes do not prove equal prefixes: whoever merges by hash
compares the tokens as well.

`SipHash` is the default module. Any function from integers [N, k] to integers [N], each row for itself, can take its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramet.errors import ForestError

PrefixHash: TypeAlias = Callable[[Tensor], Tensor]
"""From integers [N, k] to integers [N], each row for itself. The fold calls it with pairs: k = 2, int64."""

_Words: TypeAlias = NDArray[np.uint64]
_State: TypeAlias = tuple[int, int, int, int]

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_PAIR_END = 16 << 56
# "somepseudorandomlygeneratedbytes", the constant of the paper.
_CONSTANT = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
# Up to this many rows Python integers are faster: a numpy call costs a third of a microsecond, and a pair takes 130.
_FEW_ROWS = 4
# Up to this many rows half-word swaps are faster than shifts: one call in place of three, but strided.
_SWAP_ROWS = 256
# Blocks of this many rows keep the working arrays in the cache.
_BLOCK_ROWS = 2048


@dataclass(frozen=True, slots=True)
class SipHash:
    """Hash each row of integers with SipHash-2-4 under a key of 16 bytes.

    Called with integers [N, k] it returns int64 [N]: the hash of the k values of a row as little-endian int64 bytes.
    Every integer dtype is widened to int64 first, so that int32 and int64 agree; negative values are as good as any.
    The default key is the one of the published test vectors. The hash of 64 bits is returned in two's complement.

    Paper: https://www.aumasson.jp/siphash/siphash.pdf

    Raises:
        TypeError: the key is not bytes, or the rows are not integers.
        ValueError: the key has not 16 bytes, or the rows are not [N, k].

    >>> SipHash()(torch.tensor([[1, 2], [3, 4]])).tolist()
    [3978982813190876261, 8818413801738540234]
    >>> hex(SipHash().digest(b""))
    '0x726fdb47dd0e0e31'
    """

    key: bytes = bytes(range(16))

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes):
            raise TypeError(f"key must be bytes: found {type(self.key).__name__}")
        if len(self.key) != 16:
            raise ValueError(f"key must have 16 bytes: found {len(self.key)}")

    def digest(self, message: bytes) -> int:
        """Return the hash of any bytes, from 0 to 2**64 - 1."""
        whole = len(message) - len(message) % 8
        words = [int.from_bytes(message[i : i + 8], "little") for i in range(0, whole, 8)]
        end = int.from_bytes(message[whole:], "little") | (len(message) & 0xFF) << 56
        return _hash_ints(self._state(), (*words, end))

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the hash int64 [N] of each row of integers [N, k], on the device of `rows`."""
        _check_integers("rows", rows)
        if rows.ndim != 2:
            raise ValueError(f"rows must be [N, k]: found shape {list(rows.shape)}")
        words = _words(rows)
        return _tensor(self._hash(list(np.ascontiguousarray(words.T)), len(words)), rows.device)

    def _hash(self, columns: Sequence[_Words], count: int) -> _Words:
        """Return the hash of each of `count` rows, given by its columns."""
        state, end = self._state(), (8 * len(columns) & 0xFF) << 56
        out = np.empty(count, dtype=np.uint64)
        if count <= _FEW_ROWS:
            for row in range(count):
                out[row] = _hash_ints(state, (*[int(column[row]) for column in columns], end))
            return out
        for i in range(0, count, _BLOCK_ROWS):
            part = out[i : i + _BLOCK_ROWS]
            _Lanes(state, len(part)).hash([column[i : i + _BLOCK_ROWS] for column in columns], end, part)
        return out

    def _state(self) -> _State:
        """Return the four words that every message starts from."""
        low, high = int.from_bytes(self.key[:8], "little"), int.from_bytes(self.key[8:], "little")
        a, b, c, d = _CONSTANT
        return a ^ low, b ^ high, c ^ low, d ^ high

    def _fold(self, start: _Words, values: _Words, offsets: NDArray[np.int64]) -> _Words:
        """Return the hash of every prefix: long rows first, so that those still going are always the first rows."""
        state, out = self._state(), np.empty_like(values)
        lengths = np.diff(offsets)
        order = np.argsort(-lengths, kind="stable")
        for i in range(0, len(order), _BLOCK_ROWS):
            block = order[i : i + _BLOCK_ROWS]
            _fold_block(state, start[block], offsets[block], lengths[block], values, out)
        return out


def initial(module: PrefixHash) -> int:
    """Return h_0, the hash of the empty prefix, as an int64.

    For `SipHash` it is the hash of the empty message, which depends on the key alone. Any other module is asked for the
    hash of the pair (0, 0): the fold gives it nothing but pairs, so it need not know rows of other widths.

    >>> initial(SipHash()) == SipHash().digest(b"")
    True
    """
    if isinstance(module, SipHash):
        return _signed(module.digest(b""))
    return int(_apply(module, torch.zeros(1, 2, dtype=torch.int64)).item())


_DEFAULT = SipHash()


def absorb(hashes: Tensor, tokens: Tensor, module: PrefixHash = _DEFAULT) -> Tensor:
    """Take one step of the fold in each row: `hashes` int64 [N] and `tokens` integers [N] give int64 [N].

    Raises `ForestError` where the shapes do not fit and `TypeError` where something is not integers.

    >>> h = torch.full((2,), initial(SipHash()))
    >>> bool((absorb(h, torch.tensor([5, 6])) == fold(h, torch.tensor([[5], [6]]))[:, 0]).all())
    True
    """
    if hashes.ndim != 1 or hashes.shape != tokens.shape:
        raise ForestError(
            f"absorb takes hashes [N] and tokens [N]: found {list(hashes.shape)} and {list(tokens.shape)}"
        )
    _check_integers("hashes", hashes)
    _check_integers("tokens", tokens)
    if isinstance(module, SipHash):
        return _tensor(module._hash((_words(hashes), _words(tokens)), len(hashes)), hashes.device)
    return _apply(module, torch.stack([hashes, tokens.to(torch.int64)], dim=1))


def fold(start: Tensor, tokens: Tensor, module: PrefixHash = _DEFAULT) -> Tensor:
    """Continue the fold from `start` int64 [N] over `tokens` [N, k]; return every hash on the way, int64 [N, k].

    Raises `ForestError` where the shapes do not fit and `TypeError` where the dtypes are not integers.

    >>> h = torch.full((1,), initial(SipHash()))
    >>> all_at_once = fold(h, torch.tensor([[5, 6, 7]]))
    >>> in_two_steps = fold(fold(h, torch.tensor([[5, 6]]))[:, -1], torch.tensor([[7]]))
    >>> bool(all_at_once[0, -1] == in_two_steps[0, -1])
    True
    """
    if tokens.ndim != 2 or start.shape != tokens.shape[:1]:
        raise ForestError(f"fold takes start [N] and tokens [N, k]: found {list(start.shape)} and {list(tokens.shape)}")
    rows, width = tokens.shape
    offsets = torch.arange(rows + 1) * width
    return prefix_hashes(tokens.reshape(-1), offsets, module, start=start).view(rows, width)


def prefix_hashes(
    values: Tensor, offsets: Tensor, module: PrefixHash = _DEFAULT, *, start: Tensor | None = None
) -> Tensor:
    """Hash every prefix of every ragged row, int64 [total], on the device of `values`.

    Row b is `values[offsets[b]:offsets[b + 1]]`; the entry at a token is the hash of the row up to and with that
    token. Empty rows are legal and have no entry. `start` int64 [B] continues folds that began elsewhere; None starts
    each row at `initial(module)`. All rows take a step at once; work is O(total + longest row).

    Raises:
        TypeError: values, offsets or start are not integers, or the module's result is not.
        ForestError: offsets do not cover values, start has not one entry a row, or the module's result is not [N].

    >>> h = prefix_hashes(torch.tensor([5, 6, 5, 6, 7]), torch.tensor([0, 2, 2, 5]))
    >>> h[:2].tolist() == h[2:4].tolist(), h.unique().numel()
    (True, 3)
    """
    _check_integers("values", values)
    _check_offsets(values, offsets)
    rows = offsets.numel() - 1
    if start is None:
        start = torch.full((rows,), initial(module), dtype=torch.int64)
    _check_integers("start", start)
    if start.shape != (rows,):
        raise ForestError(f"start must have one hash for each of {rows} rows: found shape {list(start.shape)}")
    if isinstance(module, SipHash):
        bounds: NDArray[np.int64] = offsets.detach().cpu().to(torch.int64).numpy()
        return _tensor(module._fold(_words(start), _words(values), bounds), values.device)
    return _fold_any(module, start, values, offsets)


def _fold_any(module: PrefixHash, start: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
    """Fold with a module of the user's own, one call for each position, on the device of `values`."""
    values, offsets = values.to(torch.int64), offsets.to(values.device, torch.int64)
    lengths, order = offsets.diff().sort(descending=True, stable=True)
    firsts = offsets[:-1][order]
    hashes = start.to(values.device, torch.int64)[order]
    out = torch.empty_like(values)
    going = torch.searchsorted(-lengths, -torch.arange(int(lengths[0]) if lengths.numel() else 0, device=values.device))
    for step, count in enumerate(going.tolist()):
        where = firsts[:count] + step
        hashes = _apply(module, torch.stack([hashes[:count], values[where]], dim=1))
        out[where] = hashes
    return out


def _apply(module: PrefixHash, pairs: Tensor) -> Tensor:
    """Call a user's module and check its answer; int64 [N]."""
    hashes = module(pairs)
    _check_integers("the result of the hashing module", hashes)
    if hashes.shape != pairs.shape[:1]:
        raise ForestError(
            f"the hashing module must map {list(pairs.shape)} to [{len(pairs)}]: found {list(hashes.shape)}",
            hint="return one integer for each row",
        )
    return hashes.to(pairs.device, torch.int64)


def _fold_block(
    state: _State, start: _Words, firsts: NDArray[np.int64], lengths: NDArray[np.int64], values: _Words, out: _Words
) -> None:
    """Fold rows that are sorted by falling length, all at once while they are many and then one by one."""
    steps = int(lengths[_FEW_ROWS]) if len(lengths) > _FEW_ROWS else 0
    lanes = _Lanes(state, 0)
    for step, count in enumerate(np.searchsorted(-lengths, -np.arange(steps)).tolist()):
        if lanes.rows != count:
            lanes = _Lanes(state, count)
        where, hashes = firsts[:count] + step, start[:count]
        lanes.hash((hashes, values[where]), _PAIR_END, hashes)
        out[where] = hashes
    few = slice(0, _FEW_ROWS)
    for last, first, length in zip(start[few].tolist(), firsts[few].tolist(), lengths[few].tolist(), strict=True):
        if length > steps:
            rest = slice(first + steps, first + length)
            out[rest] = _fold_ints(state, last, values[rest].tolist())


def _fold_ints(state: _State, last: int, tokens: list[int]) -> list[int]:
    """Fold one row in Python integers; all are unsigned."""
    hashes = []
    for token in tokens:
        last = _hash_ints(state, (last, token, _PAIR_END))
        hashes.append(last)
    return hashes


def _hash_ints(state: _State, words: Sequence[int]) -> int:
    """Hash one message in Python integers: its 8-byte words, the closing word with the length among them."""
    v0, v1, v2, v3 = state
    for word in words:
        v0, v1, v2, v3 = _rounds(v0, v1, v2, v3 ^ word, 2)
        v0 ^= word
    v0, v1, v2, v3 = _rounds(v0, v1, v2 ^ 0xFF, v3, 4)
    return v0 ^ v1 ^ v2 ^ v3


def _rounds(v0: int, v1: int, v2: int, v3: int, count: int) -> _State:
    """Mix the four words; rotations are shifts whose overflow the mask cuts off."""
    for _ in range(count):
        v0 = (v0 + v1) & _MASK
        v2 = (v2 + v3) & _MASK
        v1 = ((v1 << 13 | v1 >> 51) & _MASK) ^ v0
        v3 = ((v3 << 16 | v3 >> 48) & _MASK) ^ v2
        v0 = ((v0 << 32 | v0 >> 32) + v3) & _MASK
        v2 = (v2 + v1) & _MASK
        v1 = ((v1 << 17 | v1 >> 47) & _MASK) ^ v2
        v3 = ((v3 << 21 | v3 >> 43) & _MASK) ^ v0
        v2 = (v2 << 32 | v2 >> 32) & _MASK
    return v0, v1, v2, v3


class _Lanes:
    """The working arrays of SipHash over n rows.

    v1 and v3 live in one array, `odd` [2n], because a round does the same to both: half the calls. So do v0 and v2, in
    a line of four cells of n words each that a round goes through once: it adds into the first two cells, rotates v0
    from the first to the third, where it stands behind v2, so that the second addition finds its words in the order of
    `odd`; and rotates v2 to the fourth, where it stands behind v0 again. Every operation is on whole arrays without
    gaps, which is when numpy is quick. Arrays of uint64 wrap around in silence, and words are values, not bytes, so the
    machine's byte order is without effect.
    """

    def __init__(self, state: _State, rows: int) -> None:
        n = self.rows = rows
        self.even_start, self.odd_start, self.shifts = _constants(state, n)
        self.line = np.empty(4 * n, dtype=np.uint64)
        self.odd, self.spare = np.empty((2, 2 * n), dtype=np.uint64)
        cells = self.line.reshape(4, n)
        self.v0, self.v2, self.v1, self.v3 = cells[2], cells[3], self.odd[:n], self.odd[n:]
        self.sums = cells[0], cells[1]
        halves = cells.view(np.uint32).reshape(4, n, 2)
        self.swaps = ((halves[2], halves[0, :, ::-1]), (halves[3], halves[1, :, ::-1])) if n <= _SWAP_ROWS else None

    def hash(self, words: Sequence[_Words], end: int, out: _Words) -> None:
        """Write the hash of each row to `out` [n]: `words` are its 8-byte words, [n] each, `end` the closing one."""
        v0, v2, v3 = self.v0, self.v2, self.v3
        self.line[2 * self.rows :], self.odd[:] = self.even_start, self.odd_start
        for word in (*words, np.array([end], dtype=np.uint64)):
            np.bitwise_xor(v3, word, v3)
            self._rounds(2)
            np.bitwise_xor(v0, word, v0)
        np.bitwise_xor(v2, _FF, v2)
        self._rounds(4)
        np.bitwise_xor(v0, self.v1, v0)
        np.bitwise_xor(v2, v3, v2)
        np.bitwise_xor(v0, v2, out)

    def _rounds(self, count: int) -> None:
        """Mix the four words."""
        n, odd, spare, swaps, sums = self.rows, self.odd, self.spare, self.swaps, self.sums
        front, middle, back = self.line[: 2 * n], self.line[n : 3 * n], self.line[2 * n :]
        left, right, left_again, right_again = self.shifts
        for _ in range(count):
            np.add(back, odd, front)
            np.right_shift(odd, right, spare)
            np.left_shift(odd, left, odd)
            np.bitwise_or(odd, spare, odd)
            np.bitwise_xor(odd, front, odd)
            if swaps is None:
                _turn_half(sums[0], self.v0, spare[:n])
            else:
                swaps[0][0][...] = swaps[0][1]
            np.add(middle, odd, middle)
            np.right_shift(odd, right_again, spare)
            np.left_shift(odd, left_again, odd)
            np.bitwise_or(odd, spare, odd)
            np.bitwise_xor(odd, middle, odd)
            if swaps is None:
                _turn_half(sums[1], self.v2, spare[:n])
            else:
                swaps[1][0][...] = swaps[1][1]


@lru_cache(maxsize=8)
def _constants(state: _State, n: int) -> tuple[_Words, _Words, _Words]:
    """Return what the lanes of n rows start from, and what they are shifted by; never written to."""
    v0, v1, v2, v3 = state
    even, odd = np.repeat(np.array([v0, v2, v1, v3], np.uint64), n).reshape(2, -1)
    return even, odd, np.repeat(_SHIFTS, n).reshape(4, -1)


_FF, _HALF = np.uint64(0xFF), np.uint64(32)
# What v1 and v3 are shifted by, to the left and to the right, in the first half of a round and in the second.
_SHIFTS = np.array([13, 16, 64 - 13, 64 - 16, 17, 21, 64 - 17, 64 - 21], dtype=np.uint64)


def _turn_half(source: _Words, target: _Words, spare: _Words) -> None:
    """Write `source`, rotated by 32 bits, to `target`."""
    np.right_shift(source, _HALF, spare)
    np.left_shift(source, _HALF, target)
    np.bitwise_or(target, spare, target)


def _words(integers: Tensor) -> _Words:
    """Return integers as uint64 in two's complement, on the host."""
    array: NDArray[np.int64] = integers.detach().cpu().to(torch.int64).numpy()
    return array.view(np.uint64)


def _tensor(words: _Words, device: torch.device) -> Tensor:
    """Return uint64 words as an int64 tensor in two's complement."""
    return torch.from_numpy(words.view(np.int64)).to(device)


def _signed(word: int) -> int:
    """Return an unsigned 64-bit word as an int64 in two's complement."""
    return word - (1 << 64) if word >> 63 else word


def _check_integers(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor of integers: found {type(tensor).__name__}")
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name} must hold integers: found {tensor.dtype}")


def _check_offsets(values: Tensor, offsets: Tensor) -> None:
    _check_integers("offsets", offsets)
    if values.ndim != 1 or offsets.ndim != 1 or offsets.numel() == 0:
        raise ForestError(
            f"values must be [total] and offsets [B + 1]: found {list(values.shape)} and {list(offsets.shape)}"
        )
    if offsets[0] != 0 or offsets[-1] != values.numel() or bool((offsets.diff() < 0).any()):
        raise ForestError(
            f"offsets must rise from 0 to {values.numel()}, the number of values: found {offsets.tolist()[:8]}",
            hint="offsets are the cumulated lengths of the rows, with a 0 in front",
        )
