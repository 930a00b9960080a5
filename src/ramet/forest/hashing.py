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
# Up to this many rows Python integers are faster: a numpy call costs half a microsecond, and a pair takes 160 of them.
_FEW_ROWS = 10
# Blocks of this many rows keep the working arrays in the cache.
_BLOCK_ROWS = 8192


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
        count, width = words.shape
        end = (8 * width & 0xFF) << 56
        if count <= _FEW_ROWS:
            state = self._state()
            out = np.array([_hash_ints(state, (*row, end)) for row in words.tolist()], dtype=np.uint64)
        else:
            out = np.empty(count, dtype=np.uint64)
            lanes = _Lanes(self._state(), min(count, _BLOCK_ROWS))
            columns = np.ascontiguousarray(words.T)
            for i in range(0, count, _BLOCK_ROWS):
                lanes.hash(list(columns[:, i : i + _BLOCK_ROWS]), end, out[i : i + _BLOCK_ROWS])
        return _tensor(out, rows.device)

    def _state(self) -> _State:
        """Return the four words that every message starts from."""
        low, high = (int.from_bytes(self.key[i : i + 8], "little") for i in (0, 8))
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
    if steps:
        lanes = _Lanes(state, len(lengths))
        for step, count in enumerate(np.searchsorted(-lengths, -np.arange(steps)).tolist()):
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
    """The working arrays of SipHash over many rows, allocated once.

    v0 and v2 live in one array and v1 and v3 in another, [2, N] each, because a round does the same to both: half the
    calls. Arrays of uint64 wrap around in silence, and words are values, not bytes, so the machine's byte order is
    without effect.
    """

    def __init__(self, state: _State, rows: int) -> None:
        self.even_start = np.array([[state[0]], [state[2]]], dtype=np.uint64)
        self.odd_start = np.array([[state[1]], [state[3]]], dtype=np.uint64)
        self.even, self.odd, self.spare = (np.empty((2, rows), dtype=np.uint64) for _ in range(3))

    def hash(self, words: Sequence[_Words], end: int, out: _Words) -> None:
        """Write the hash of each row to `out` [n]: `words` are its 8-byte words, [n] each, `end` the closing one."""
        n = len(out)
        even, odd, spare = self.even[:, :n], self.odd[:, :n], self.spare[:, :n]
        even[:], odd[:] = self.even_start, self.odd_start
        for word in (*words, np.uint64(end)):
            odd[1] ^= word
            _rounds_of_lanes(even, odd, spare, 2)
            even[0] ^= word
        even[1] ^= _FF
        _rounds_of_lanes(even, odd, spare, 4)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even[0], even[1], out=out)


def _shifts(*bits: int) -> tuple[_Words, _Words]:
    """Return the shifts to the left and to the right that make a rotation, one for each of two lanes."""
    left = np.array(bits, dtype=np.uint64)[:, None]
    return left, np.uint64(64) - left


_FF = np.uint64(0xFF)
_FIRST, _SECOND = _shifts(13, 16), _shifts(17, 21)
_HALF = (np.uint64(32), np.uint64(32))


def _rounds_of_lanes(even: _Words, odd: _Words, spare: _Words, count: int) -> None:
    """Mix (v0, v2) and (v1, v3) in place."""
    v0, v2, crossed, spare_row = even[0], even[1], even[::-1], spare[0]
    for _ in range(count):
        np.add(even, odd, out=even)
        _rotate(odd, _FIRST, spare)
        np.bitwise_xor(odd, even, out=odd)
        _rotate(v0, _HALF, spare_row)
        np.add(crossed, odd, out=crossed)
        _rotate(odd, _SECOND, spare)
        np.bitwise_xor(odd, crossed, out=odd)
        _rotate(v2, _HALF, spare_row)


def _rotate(words: _Words, shifts: tuple[_Words, _Words] | tuple[np.uint64, np.uint64], spare: _Words) -> None:
    """Rotate to the left in place."""
    np.right_shift(words, shifts[1], out=spare)
    np.left_shift(words, shifts[0], out=words)
    np.bitwise_or(words, spare, out=words)


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
