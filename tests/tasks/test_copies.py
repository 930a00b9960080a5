"""Copies of rows: deep where they can be made, and of what can not be copied the thing itself."""

from __future__ import annotations

import threading
from types import MappingProxyType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.tasks.copies import own, own_sample
from ramet.types import Sample, StopReason

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_a_copy_is_equal_and_shares_nothing_that_changes(row: dict[str, Any]) -> None:
    copied = own(row)
    assert copied == row
    assert copied is not row
    for name, value in row.items():
        assert not isinstance(value, (list, dict)) or copied[name] is not value


def test_what_can_not_be_copied_is_shared_and_the_other_columns_are_not() -> None:
    class Stubborn:
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no")

    row = {"prompt": "2+2=", "lock": threading.Lock(), "own": Stubborn(), "deep": {"x": [0]}}
    copied = own(row)
    copied["deep"]["x"].append(1)
    copied["new"] = 1
    assert row["deep"] == {"x": [0]}
    assert "new" not in row
    assert (copied["lock"], copied["own"]) == (row["lock"], row["own"])
    view = MappingProxyType(row)
    assert own(view) is view


def test_a_sample_keeps_all_but_its_copies() -> None:
    row = {"prompt": [{"role": "user", "content": "a"}]}
    state = threading.Lock()
    given = Sample(
        row["prompt"],
        "4",
        (1,),
        (2,),
        row,
        StopReason.EOS,
        group=3,
        member=1,
        messages=tuple(row["prompt"]),
        state=state,
    )
    copied = own_sample(given)
    assert copied == given
    assert copied.state is state
    assert copied.row is not row
    assert copied.messages[0] is not row["prompt"][0]
    assert copied.prompt is not row["prompt"]
