"""The hash of a prefix: published vectors, a slow oracle of its own, and the laws of a fold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramet.errors import ForestError
from ramet.forest import hashing
from ramet.forest.hashing import SipHash, absorb, fold, initial, prefix_hashes

# SipHash-2-4 under the key 00 01 .. 0f of the messages 00 01 .. of 0 to 63 bytes, as the authors publish them.
VECTORS = """
    726fdb47dd0e0e31 74f839c593dc67fd 0d6c8009d9a94f5a 85676696d7fb7e2d cf2794e0277187b7 18765564cd99a68d
    cbc9466e58fee3ce ab0200f58b01d137 93f5f5799a932462 9e0082df0ba9e4b0 7a5dbbc594ddb9f3 f4b32f46226bada7
    751e8fbc860ee5fb 14ea5627c0843d90 f723ca908e7af2ee a129ca6149be45e5 3f2acc7f57c29bdb 699ae9f52cbe4794
    4bc1b3f0968dd39c bb6dc91da77961bd bed65cf21aa2ee98 d0f2cbb02e3b67c7 93536795e3a33e88 a80c038ccd5ccec8
    b8ad50c6f649af94 bce192de8a85b8ea 17d835b85bbb15f3 2f2e6163076bcfad de4daaaca71dc9a5 a6a2506687956571
    ad87a3535c49ef28 32d892fad841c342 7127512f72f27cce a7f32346f95978e3 12e0b01abb051238 15e034d40fa197ae
    314dffbe0815a3b4 027990f029623981 cadcd4e59ef40c4d 9abfd8766a33735c 0e3ea96b5304a7d0 ad0c42d6fc585992
    187306c89bc215a9 d4a60abcf3792b95 f935451de4f21df2 a9538f0419755787 db9acddff56ca510 d06c98cd5c0975eb
    e612a3cb9ecba951 c766e62cfcadaf96 ee64435a9752fe72 a192d576b245165a 0a8787bf8ecb74b2 81b3e73d20b49b6f
    7fa8220ba3b2ecea 245731c13ca42499 b78dbfaf3a8d83bd ea1ad565322a1a0b 60e61c23a3795013 6606d7e446282b93
    6ca4ecb15c5f91e1 9f626da15c9625f3 e51b38608ef25f57 958a324ceb064572
"""
INT64 = st.integers(-(2**63), 2**63 - 1)
ROWS = st.lists(st.lists(st.integers(-2, 5), max_size=6), max_size=30)


def siphash(message: bytes, key: bytes = bytes(range(16))) -> int:
    """SipHash-2-4 as the paper writes it: four words in a list, additions modulo 2**64."""
    size = 2**64
    k = [int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")]
    v = [int.from_bytes(b"somepseudorandomlygeneratedbytes"[i : i + 8], "big") ^ k[i // 8 % 2] for i in (0, 8, 16, 24)]

    def half(a: int, b: int, bits: int) -> None:
        v[a] = (v[a] + v[b]) % size
        v[b] = v[b] * 2**bits % size + v[b] // 2 ** (64 - bits)
        v[b] ^= v[a]

    def rounds(count: int) -> None:
        for _ in range(count):
            for a, b, bits in ((0, 1, 13), (2, 3, 16)):
                half(a, b, bits)
            v[0] = v[0] % 2**32 * 2**32 + v[0] // 2**32
            for a, b, bits in ((2, 1, 17), (0, 3, 21)):
                half(a, b, bits)
            v[2] = v[2] % 2**32 * 2**32 + v[2] // 2**32

    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) % 256])
    for i in range(0, len(padded), 8):
        word = int.from_bytes(padded[i : i + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 255
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def siphash_row(row: list[int], key: bytes = bytes(range(16))) -> int:
    """The oracle for a row of int64, as an int64."""
    unsigned = siphash(b"".join(value.to_bytes(8, "little", signed=True) for value in row), key)
    return int.from_bytes(unsigned.to_bytes(8, "little"), "little", signed=True)


def ragged(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    offsets = torch.tensor([0, *[len(row) for row in rows]]).cumsum(0)
    return torch.tensor([token for row in rows for token in row], dtype=torch.int64), offsets


def slow_prefixes(rows: list[list[int]], start: int) -> list[int]:
    """Every prefix hash of every row, one pair after the other, from the oracle."""
    hashes = []
    for row in rows:
        last = start
        for token in row:
            last = siphash_row([last, token])
            hashes.append(last)
    return hashes


def polynomial(rows: Tensor) -> Tensor:
    """A module of a user's own: it reads its row from left to right."""
    hashes = torch.full(rows.shape[:1], 7, dtype=torch.int64)
    for column in rows.T:
        hashes = hashes * 31 + column
    return hashes


def test_digest_gives_the_published_vectors() -> None:
    vectors = [int(word, 16) for word in VECTORS.split()]
    assert len(vectors) == 64
    assert [SipHash().digest(bytes(range(n))) for n in range(64)] == vectors


def test_oracle_gives_the_published_vectors() -> None:
    assert [siphash(bytes(range(n))) for n in range(64)] == [int(word, 16) for word in VECTORS.split()]


@settings(deadline=None, max_examples=50)
@given(st.binary(min_size=16, max_size=16), st.binary(max_size=300))
def test_digest_equals_the_oracle_for_any_key_and_message(key: bytes, message: bytes) -> None:
    assert SipHash(key).digest(message) == siphash(message, key)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 10, 11, 40, 256, 257])
@pytest.mark.parametrize("width", [0, 1, 2, 3, 33])
def test_each_row_is_the_hash_of_its_bytes(count: int, width: int) -> None:
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(-(2**63), 2**63 - 1, (count, width), generator=generator)
    hashes = SipHash(b"sixteen bytes ok")(rows)
    assert hashes.dtype == torch.int64
    assert hashes.tolist() == [siphash_row(row, b"sixteen bytes ok") for row in rows.tolist()]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(INT64, INT64), min_size=11, max_size=30))
def test_a_row_alone_hashes_as_in_a_batch(pairs: list[tuple[int, int]]) -> None:
    """Few rows go through Python integers and many through arrays: nobody can tell."""
    rows = torch.tensor(pairs)
    assert SipHash()(rows).tolist() == [SipHash()(row[None]).item() for row in rows]


def test_rows_in_several_blocks_hash_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-9, 9, (50, 4), generator=generator)
    values, offsets = ragged([row[: int(row[0]) % 5] for row in rows.tolist()])
    whole = SipHash()(rows).tolist(), prefix_hashes(values, offsets).tolist()
    monkeypatch.setattr(hashing, "_BLOCK_ROWS", 13)
    assert (SipHash()(rows).tolist(), prefix_hashes(values, offsets).tolist()) == whole


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("count", [2, 20])
def test_integers_of_any_width_hash_alike(dtype: torch.dtype, count: int) -> None:
    """Negative values too: they are widened with their sign."""
    rows = torch.arange(-5, 2 * count - 5).view(count, 2)
    assert SipHash()(rows.to(dtype)).tolist() == SipHash()(rows).tolist()
    offsets = torch.arange(count + 1) * 2
    narrow = prefix_hashes(rows.view(-1).to(dtype), offsets.to(torch.int32))
    assert narrow.tolist() == prefix_hashes(rows.view(-1), offsets).tolist()


def test_a_view_with_gaps_hashes_as_its_copy() -> None:
    rows = torch.arange(120).view(20, 6)[:, ::2]
    assert SipHash()(rows).tolist() == SipHash()(rows.clone(memory_format=torch.contiguous_format)).tolist()
    assert not rows.is_contiguous()


def test_another_key_is_another_hash() -> None:
    rows = torch.arange(24).view(12, 2)
    ours, theirs = SipHash()(rows), SipHash(bytes(16))(rows)
    assert not (ours == theirs).any()
    assert initial(SipHash()) != initial(SipHash(bytes(16)))
    assert SipHash() == SipHash(bytes(range(16)))


def test_the_fold_starts_from_the_key_alone() -> None:
    """0x726fdb47dd0e0e31 is the published hash of the empty message."""
    assert initial(SipHash()) == 0x726FDB47DD0E0E31


def test_the_fold_of_a_user_module_starts_from_the_pair_of_zeros() -> None:
    assert initial(polynomial) == 7 * 31 * 31


@settings(deadline=None, max_examples=50)
@given(ROWS)
def test_prefix_hashes_equal_the_slow_fold(rows: list[list[int]]) -> None:
    values, offsets = ragged(rows)
    assert prefix_hashes(values, offsets).tolist() == slow_prefixes(rows, 0x726FDB47DD0E0E31)


def test_long_rows_among_many_short_ones_equal_the_slow_fold() -> None:
    """The arrays take the common part and Python integers the long rest."""
    rows = [[3] * 4] * 9 + [list(range(9))] * 2 + [list(range(40)), [], [1]] + [[2] * 6] * 5
    values, offsets = ragged(rows)
    assert prefix_hashes(values, offsets).tolist() == slow_prefixes(rows, 0x726FDB47DD0E0E31)


@settings(deadline=None, max_examples=50)
@given(ROWS)
def test_equal_prefixes_hash_alike_and_others_do_not(rows: list[list[int]]) -> None:
    prefixes = [tuple(row[: i + 1]) for row in rows for i in range(len(row))]
    hashes = prefix_hashes(*ragged(rows)).tolist()
    pairs = set(zip(prefixes, hashes, strict=True))
    assert len(pairs) == len(set(prefixes)) == len(set(hashes))


@pytest.mark.parametrize("module", [SipHash(), SipHash(bytes(16)), polynomial])
@settings(deadline=None, max_examples=25)
@given(rows=ROWS, cut=st.integers(0, 6))
def test_a_prefix_hashes_alike_however_it_was_reached(
    module: hashing.PrefixHash, rows: list[list[int]], cut: int
) -> None:
    """Given at once, or in two pieces with the fold continued from the first, or alone."""
    values, offsets = ragged(rows)
    whole = prefix_hashes(values, offsets, module).tolist()
    alone = [h for row in rows for h in prefix_hashes(*ragged([row]), module).tolist()]
    heads, tails = [row[:cut] for row in rows], [row[cut:] for row in rows]
    first = prefix_hashes(*ragged(heads), module).tolist()
    head_hashes = [[first.pop(0) for _ in head] for head in heads]
    start = torch.tensor([head[-1] if head else initial(module) for head in head_hashes], dtype=torch.int64)
    second = prefix_hashes(*ragged(tails), module, start=start).tolist()
    pieces = [h for head, tail in zip(head_hashes, tails, strict=True) for h in [*head, *[second.pop(0) for _ in tail]]]
    assert whole == alone == pieces


@pytest.mark.parametrize("module", [SipHash(), polynomial])
@pytest.mark.parametrize("shape", [(1, 5), (30, 4), (3, 0), (0, 3)])
def test_fold_returns_every_hash_on_the_way(module: hashing.PrefixHash, shape: tuple[int, int]) -> None:
    tokens = torch.arange(shape[0] * shape[1]).view(shape)
    start = torch.arange(shape[0]) - 2
    expected = torch.empty(shape, dtype=torch.int64)
    hashes = start
    for t in range(shape[1]):
        hashes = module(torch.stack([hashes, tokens[:, t]], dim=1))
        expected[:, t] = hashes
    found = fold(start, tokens, module)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)


@pytest.mark.parametrize("module", [SipHash(), SipHash(bytes(16)), polynomial])
@pytest.mark.parametrize("count", [0, 1, 3, 70, 300])
def test_absorb_takes_one_step_of_the_fold(module: hashing.PrefixHash, count: int) -> None:
    hashes, tokens = torch.arange(count) * 10**15 - 7, torch.arange(count, dtype=torch.int32) - 3
    copies = hashes.clone(), tokens.clone()
    found = absorb(hashes, tokens, module)
    assert found.dtype == torch.int64
    assert found.tolist() == fold(hashes, tokens[:, None], module).view(-1).tolist()
    assert torch.equal(hashes, copies[0])
    assert torch.equal(tokens, copies[1])


def test_absorb_equals_the_slow_fold() -> None:
    starts = [5, -6, 2**62]
    expected = [siphash_row([start, token]) for start, token in zip(starts, [1, 2, 3], strict=True)]
    assert absorb(torch.tensor(starts), torch.tensor([1, 2, 3])).tolist() == expected


def test_absorb_refuses_what_does_not_fit() -> None:
    with pytest.raises(ForestError, match=r"hashes \[N\] and tokens \[N\]: found \[2\] and \[2, 1\]"):
        absorb(torch.arange(2), torch.arange(2)[:, None])
    for module in (SipHash(), polynomial):
        with pytest.raises(TypeError, match=r"tokens must hold integers: found torch\.float32"):
            absorb(torch.arange(2), torch.ones(2), module)


def test_inputs_are_left_as_they_were() -> None:
    values, offsets, start = torch.arange(60), torch.arange(21) * 3, torch.arange(20)
    copies = values.clone(), offsets.clone(), start.clone()
    prefix_hashes(values, offsets, start=start)
    SipHash()(values.view(20, 3))
    assert all(torch.equal(a, b) for a, b in zip((values, offsets, start), copies, strict=True))


def test_a_user_module_by_hand() -> None:
    """From 7 * 31 * 31 = 6727, the pair (h, x) gives (7 * 31 + h) * 31 + x."""
    first = (217 + 6727) * 31 + 5
    second = (217 + first) * 31 + 1
    assert prefix_hashes(torch.tensor([5, 1, 5]), torch.tensor([0, 2, 2, 3]), polynomial).tolist() == [
        first,
        second,
        first,
    ]


@pytest.mark.parametrize("rows", [[], [[]], [[], [], []], [[1], [], [2]]])
@pytest.mark.parametrize("module", [SipHash(), polynomial])
def test_empty_rows_are_legal(module: hashing.PrefixHash, rows: list[list[int]]) -> None:
    hashes = prefix_hashes(*ragged(rows), module)
    assert hashes.shape == (sum(map(len, rows)),)
    assert hashes.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_values_that_are_not_integers_are_refused(dtype: torch.dtype) -> None:
    ones = torch.ones(2, 2, dtype=dtype)
    with pytest.raises(TypeError, match=f"rows must hold integers: found {dtype}"):
        SipHash()(ones)
    with pytest.raises(TypeError, match=f"values must hold integers: found {dtype}"):
        prefix_hashes(ones[0], torch.tensor([0, 2]))
    with pytest.raises(TypeError, match=f"the result of the hashing module must hold integers: found {dtype}"):
        initial(lambda rows: torch.ones(len(rows), dtype=dtype))


@pytest.mark.parametrize("offsets", [[1, 3], [0, 2], [0, 4], [0, 3, 2, 3], []])
def test_offsets_that_do_not_cover_the_values_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ForestError, match="offsets"):
        prefix_hashes(torch.arange(3), torch.tensor(offsets, dtype=torch.int64))


def test_a_user_module_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ForestError, match=r"must map \[2, 2\] to \[2\]: found \[2, 2\]"):
        fold(torch.zeros(2, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64), lambda rows: rows)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ForestError, match=r"start \[N\] and tokens \[N, k\]: found \[3\] and \[2, 1\]"):
        fold(torch.zeros(3, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ForestError, match=r"one hash for each of 1 rows: found shape \[2\]"):
        prefix_hashes(torch.arange(3), torch.tensor([0, 3]), start=torch.arange(2))
    with pytest.raises(ValueError, match=r"rows must be \[N, k\]: found shape \[3\]"):
        SipHash()(torch.arange(3))


def test_a_key_that_is_not_16_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes: found 3"):
        SipHash(b"abc")
    with pytest.raises(TypeError, match="bytes: found str"):
        SipHash("sixteen bytes ok")  # type: ignore[arg-type]
