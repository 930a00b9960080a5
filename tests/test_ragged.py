"""Rows of different lengths: every form holds the same rows, and appending costs what is appended."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from ramet import ragged
from ramet.ragged import Appender, Ragged, rows

fast = settings(deadline=None, max_examples=40)
rows_of_ids = st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=5)


def ids(rows):
    return [torch.tensor(row, dtype=torch.int64) for row in rows]


def lists(rows):
    return [row.tolist() for row in rows]


def with_room(rows, room):
    """Rows as a jagged tensor with `room` junk entries behind each."""
    values = torch.cat([torch.cat([row, torch.full((room,), 77)]) for row in ids(rows)])
    offsets = torch.tensor([0, *[len(row) + room for row in rows]]).cumsum(0)
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths)


@fast
@given(rows_of_ids, st.sampled_from(["left", "right"]), st.integers(0, 3))
def test_every_form_gives_the_rows_back(rows, side, pad):
    """Also where the pad value is a token that rows hold."""
    made = Ragged.from_rows(ids(rows))
    padded, mask = made.padded(side, pad)
    for form in (
        made,
        Ragged.from_padded(padded, mask),
        Ragged.from_padded(padded, mask.long()),
        Ragged.from_any(made.jagged()),
        Ragged.from_any(with_room(rows, 2)),
        Ragged.from_any(with_room(rows, 2)).compact(),
        Ragged.from_any(ids(rows)),
        Ragged.from_any(padded, mask),
    ):
        assert lists(form.rows()) == rows
        assert form.lengths.tolist() == [len(row) for row in rows]
        assert len(form) == len(rows)


@fast
@given(rows_of_ids, st.sampled_from(["left", "right"]))
def test_padding_by_hand(rows, side):
    """The padded tensor and its mask are those of a loop over the rows."""
    padded, mask = Ragged.from_any(with_room(rows, 1)).padded(side, 9)
    width = max(map(len, rows))
    for row, got, real in zip(rows, padded.tolist(), mask.tolist(), strict=True):
        blank = width - len(row)
        assert got == ([9] * blank + row if side == "left" else row + [9] * blank)
        assert real == ([False] * blank + [True] * len(row) if side == "left" else [True] * len(row) + [False] * blank)


@fast
@given(rows_of_ids, st.data())
def test_append_where_index_and_any_equal_a_loop(rows, data):
    """Row-wise operations equal Python lists, for rows with and without room."""
    others = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=len(rows), max_size=len(rows)))
    flags = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    for one in (Ragged.from_rows(ids(rows)), Ragged.from_any(with_room(rows, 2))):
        other = Ragged.from_rows(ids(others))
        mask = torch.tensor(flags)
        assert lists(one.append(other).rows()) == [a + b for a, b in zip(rows, others, strict=True)]
        assert lists(one.where(mask, other).rows()) == [
            a if flag else b for a, b, flag in zip(rows, others, flags, strict=True)
        ]
        assert lists(one[mask].rows()) == [row for row, flag in zip(rows, flags, strict=True) if flag]
        assert lists(one[1:].rows()) == rows[1:]
        assert Ragged(one.values == 2, one.offsets, one.sizes).any().tolist() == [2 in row for row in rows]


def test_rows_of_vectors_keep_their_other_sizes():
    """Entries may be vectors."""
    one = Ragged.from_rows([torch.ones(2, 3), torch.zeros(1, 3)])
    padded, mask = one.padded("right", -1)
    assert padded.shape == (2, 2, 3)
    assert padded[1, 1].tolist() == [-1, -1, -1]
    assert lists(Ragged.from_padded(padded, mask).rows()) == lists(one.rows())


def test_rows_that_start_elsewhere_than_their_storage_are_read_right():
    """As those of a slice of a jagged tensor may."""
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([2, 2, 5]))
    assert lists(Ragged.from_any(jagged).rows()) == [[], [2, 3, 4]]
    assert lists(Ragged.from_any(jagged).compact().rows()) == [[], [2, 3, 4]]


def test_a_mask_of_a_list_or_of_jagged_rows_drops_entries():
    """A mask has the form of what it masks."""
    mask = [torch.tensor([True, False]), torch.tensor([True])]
    rows = ids([[1, 2], [3]])
    assert lists(Ragged.from_any(rows, mask).rows()) == [[1], [3]]
    jagged = Ragged.from_rows(rows).jagged(), Ragged.from_rows(mask).jagged()
    assert lists(Ragged.from_any(*jagged).rows()) == [[1], [3]]


def test_what_does_not_fit_is_refused():
    """Errors say what is wrong."""
    with pytest.raises(ValueError, match="no rows"):
        Ragged.from_rows([])
    with pytest.raises(ValueError, match=r"one dtype: found .*float32.*int64"):
        Ragged.from_rows([torch.zeros(1), torch.zeros(1, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"mask of shape \(2, 3\)"):
        Ragged.from_padded(torch.zeros(2, 2), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="2 rows can not be appended to 1"):
        Ragged.from_rows(ids([[1]])).append(Ragged.from_rows(ids([[1], [2]])))
    with pytest.raises(ValueError, match='"left" or "right": found \'middle\''):
        Ragged.from_rows(ids([[1]])).padded("middle")
    with pytest.raises(ValueError, match="3 entries does not fit a width of 2"):
        Ragged.from_rows(ids([[1, 2, 3]])).padded("left", width=2)
    with pytest.raises(ValueError, match="not as long"):
        Ragged.from_any(ids([[1, 2]]), [torch.tensor([True])])


def test_the_first_jagged_tensor_of_a_process_is_silent():
    """Nothing goes to the terminal: no warning, no log line."""
    code = "import torch; from ramet.ragged import Ragged; Ragged.from_rows([torch.tensor([1])]).jagged()"
    path = str(Path(ragged.__file__).parents[2])
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, env={"PYTHONPATH": path})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# Appending.


def appended(appender, form, prompts, actions, room=0):
    """Append actions one after another; return the rows after each, and the last masks' rows."""
    if form == "jagged":
        tokens = with_room(prompts, room) if room else Ragged.from_rows(ids(prompts)).jagged()
        mask = Ragged(torch.ones(len(tokens.values()), dtype=torch.bool), tokens.offsets(), tokens.lengths()).jagged()
    else:
        tokens, mask = Ragged.from_rows(ids(prompts)).padded("left" if form == "left" else "right", 0)
    seen = []
    for action in actions:
        tokens, mask = appender.append(tokens, mask, Ragged.from_rows(ids(action)))
        seen.append((tokens, mask))
    return seen


def read(tokens, mask):
    return lists(Ragged.from_any(tokens, mask).rows())


@fast
@given(rows_of_ids, st.integers(1, 4), st.sampled_from(["jagged", "left", "right"]), st.integers(0, 2), st.data())
def test_rows_grow_by_exactly_what_is_appended(prompts, steps, form, room, data):
    """In each layout, whatever is in the padding; and what was observed before stays as it was."""
    row = st.lists(st.integers(0, 3), max_size=4)
    batch = st.lists(row, min_size=len(prompts), max_size=len(prompts))
    actions = data.draw(st.lists(batch, min_size=steps, max_size=steps))
    seen = appended(Appender(), form, prompts, actions, room)
    expected = prompts
    for (tokens, mask), action in zip(seen, actions, strict=True):
        expected = [old + new for old, new in zip(expected, action, strict=True)]
        assert read(tokens, mask) == expected
        assert tokens.is_nested == (form == "jagged")
        if not tokens.is_nested and sum(map(len, action)) and len({len(new) for new in action}) > 1:
            width = max(map(len, expected))
            assert mask.tolist() == [[False] * (width - len(r)) + [True] * len(r) for r in expected]


@pytest.mark.parametrize("form", ["jagged", "left"])
def test_two_continuations_of_one_view_never_meet(form):
    """The second append to the same rows copies; the first goes on growing in place."""
    appender = Appender()
    (first,) = appended(appender, form, [[1, 2], [3, 4]], [[[5], [6]]])
    a = appender.append(*first, Ragged.from_rows(ids([[7], [7]])))
    b = appender.append(*first, Ragged.from_rows(ids([[8], [8]])))
    a2 = appender.append(*a, Ragged.from_rows(ids([[9], [9]])))
    b2 = appender.append(*b, Ragged.from_rows(ids([[0], [0]])))
    assert read(*first) == [[1, 2, 5], [3, 4, 6]]
    assert read(*a2) == [[1, 2, 5, 7, 9], [3, 4, 6, 7, 9]]
    assert read(*b2) == [[1, 2, 5, 8, 0], [3, 4, 6, 8, 0]]


@pytest.mark.parametrize("form", ["jagged", "left"])
def test_many_steps_copy_only_a_few_times(form):
    """The number of buffers behind T observations grows like log T, so all of them hold O(T) tokens."""
    appender, steps = Appender(), 400
    seen = appended(appender, form, [[1, 2], [3, 4]], [[[5], [6]]] * steps)
    buffers = {(t.values() if t.is_nested else t).untyped_storage().data_ptr() for t, _ in seen}
    assert len(buffers) <= 12
    held = {(s := (t.values() if t.is_nested else t).untyped_storage()).data_ptr(): s.nbytes() for t, _ in seen}
    assert sum(held.values()) / 8 <= 8 * 2 * steps


def test_memory_passed_in_from_outside_is_never_written_to():
    """A view of a larger tensor of the caller's does not grow into it."""
    owned = torch.arange(8).view(2, 4)
    prompt = owned[:, :2]
    tokens, _ = Appender().append(prompt, None, torch.tensor([[9], [9]]))
    assert tokens.tolist() == [[0, 1, 9], [4, 5, 9]]
    assert owned.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_exchanged_mask_is_noticed():
    """Rows whose mask was replaced are copied with the new mask."""
    appender = Appender()
    tokens, mask = appender.append(torch.tensor([[1, 2]]), torch.tensor([[True, True]]), torch.tensor([[3]]))
    tokens, mask = appender.append(tokens, torch.tensor([[False, True, True]]), torch.tensor([[4]]))
    assert mask.tolist() == [[False, True, True, True]]
    assert read(tokens, mask) == [[2, 3, 4]]


def test_rows_made_in_inference_mode_can_grow_outside():
    """Their buffer is frozen there, so they are copied."""
    appender = Appender()
    with torch.inference_mode():
        tokens, _ = appender.append(torch.tensor([[1]]), None, torch.tensor([[2]]))
    tokens, _ = appender.append(tokens, None, torch.tensor([[3]]))
    assert tokens.tolist() == [[1, 2, 3]]


def test_copies_of_an_appender_share_no_buffer():
    """Copying and pickling start without buffers."""
    appender = Appender()
    tokens, _ = appender.append(torch.tensor([[1]]), None, torch.tensor([[2]]))
    for other in (copy.deepcopy(appender), pickle.loads(pickle.dumps(appender))):
        grown, _ = other.append(tokens, None, torch.tensor([[3]]))
        assert grown.tolist() == [[1, 2, 3]]
        assert grown.data_ptr() != tokens.data_ptr()


def test_appending_what_does_not_fit_is_refused():
    """Ragged rows on a dense batch need a mask, and a mask needs the layout of the tokens."""
    dense, uneven = torch.tensor([[1, 2], [3, 4]]), Ragged.from_rows(ids([[5], []]))
    with pytest.raises(ValueError, match=r"without a mask can not grow by different numbers of tokens \(\[1, 0\]\)"):
        Appender().append(dense, None, uneven)
    with pytest.raises(ValueError, match=r"mask of shape \(2, 1\)"):
        Appender().append(dense, torch.ones(2, 1), uneven)
    jagged = Ragged.from_rows(ids([[1], [2]])).jagged()
    with pytest.raises(ValueError, match="layout of the tokens"):
        Appender().append(jagged, torch.ones(2, 1), uneven)
    with pytest.raises(ValueError, match="not as long"):
        Appender().append(jagged, Ragged.from_rows(ids([[1], [1, 1]])).jagged(), uneven)


# Reading TensorDicts.


@fast
@given(rows_of_ids)
def test_rows_and_pad_read_every_layout(rows):
    """Padded with its mask, jagged, with room, a lazy stack of rows, nested."""
    made = Ragged.from_rows(ids(rows))
    padded, mask = made.padded("left", 1)
    size = [len(rows)]
    layouts = [
        TensorDict({"tokens": padded, "attention_mask": mask}, size),
        TensorDict({"tokens": made.jagged()}, size),
        TensorDict({"tokens": with_room(rows, 2)}, size),
        lazy_stack([TensorDict({"tokens": row}, []) for row in ids(rows)]),
    ]
    expected = made.padded("right", -1)
    for td in layouts:
        assert lists(ragged.rows(td, "tokens")) == rows
        assert lists(ragged.rows(TensorDict({"a": td}, size), ("a", "tokens"))) == rows
        got = ragged.pad(td, "tokens", "right", -1)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    single = TensorDict({"tokens": ids(rows)[0]}, [])
    assert lists(ragged.rows(single, "tokens")) == rows[:1]
    assert ragged.pad(single, "tokens", "left", 0)[0].tolist() == rows[0]


def test_a_stack_over_time_is_read_row_by_row():
    """[B, T] gives the steps of the first row first, and pads to [B, T, L]."""
    steps = [[[1], [2, 2]], [[1, 3], [2, 2, 4]]]
    tds = [TensorDict({"next": {"tokens": Ragged.from_rows(ids(rows)).jagged()}}, [2]) for rows in steps]
    td = lazy_stack(tds, 1)
    assert lists(ragged.rows(td, ("next", "tokens"))) == [[1], [1, 3], [2, 2], [2, 2, 4]]
    assert ragged.pad(td, ("next", "tokens"), "left", 0)[0].shape == (2, 2, 3)
    assert lists(ragged.rows(td[1], ("next", "tokens"))) == [[2, 2], [2, 2, 4]]
    assert lists(ragged.rows(td[:, 1], ("next", "tokens"))) == [[1, 3], [2, 2, 4]]


def test_only_tokens_have_a_mask_that_is_not_named():
    """An entry of the mask's shape is not masked by accident, and can be by name."""
    td = TensorDict({"ids": torch.tensor([[0, 5]]), "attention_mask": torch.tensor([[0, 1]])}, [1])
    assert lists(ragged.rows(td, "ids")) == [[0, 5]]
    assert lists(ragged.rows(td, "ids", mask="attention_mask")) == [[5]]


def test_text_is_read_as_strings():
    """Equal strings stay as many as they are."""
    td = TensorDict({"text": NonTensorStack("a", "a")}, [2])
    assert ragged.rows(td, "text") == ["a", "a"]
    assert ragged.rows(lazy_stack([td, td], 1), "text") == ["a"] * 4
    assert ragged.rows(TensorDict({"text": NonTensorData("a", batch_size=[3])}, [3]), "text") == ["a"] * 3
    assert ragged.rows(TensorDict({"text": "a"}, []), "text") == ["a"]
    with pytest.raises(TypeError, match="'text' holds str"):
        ragged.pad(td, "text", "left", 0)


def test_entries_without_rows_are_refused():
    """A missing key names what is there; one number a row is no row."""
    td = TensorDict({"label": torch.zeros(2), "sub": {"x": torch.zeros(2, 1)}}, [2])
    with pytest.raises(KeyError, match="no entry 'tokens'; there are"):
        ragged.rows(td, "tokens")
    with pytest.raises(KeyError, match="no entry 'y'"):
        ragged.rows(td, ("sub", "y"))
    with pytest.raises(KeyError, match="'label' holds no entries"):
        ragged.rows(td, ("label", "y"))
    with pytest.raises(ValueError, match="one number for each row"):
        ragged.rows(td, "label")


def test_each_part_of_a_lazy_stack_says_itself_whether_it_has_a_mask():
    """In either order, the row with a mask is read by it, and the other one whole."""
    bare = TensorDict({"tokens": torch.tensor([1, 5])})
    masked = TensorDict({"tokens": torch.tensor([0, 6]), "attention_mask": torch.tensor([False, True])})
    for parts, expected in (((bare, masked), [[1, 5], [6]]), ((masked, bare), [[6], [1, 5]])):
        assert [row.tolist() for row in rows(lazy_stack(list(parts)), "tokens")] == expected


def test_a_mask_of_another_width_is_refused_by_row():
    td = TensorDict({"tokens": torch.tensor([[1, 5]]), "m": torch.ones(1, 3).bool()}, [1])
    with pytest.raises(ValueError, match=r"'tokens', row 0: its mask 'm' has 3 entries for 2"):
        rows(td, "tokens", mask="m")
