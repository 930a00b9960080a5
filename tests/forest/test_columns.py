"""Forests as arrays and as files: everything comes back, and nothing else is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torch import Tensor

from ramet.envs import LLMHashingEnv
from ramet.errors import ForestError
from ramet.forest import Forest
from ramet.forest.hashing import SipHash
from ramet.transforms import DataLoadingPrimer
from ramet.types import Kind, Outcome, StopReason


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def filled() -> Forest:
    """Every kind of thing that a forest can hold."""
    forest = Forest()
    numbers = forest.plant([ids(1, 2)] * 4 + [ids()], groups=[3] * 5, members=range(5), prompt_indices=[7] * 5)
    answers = [ids(5, 6), ids(5, 6, 7), ids(5), ids(), ids(9)]
    log_probs = [-torch.arange(1.0, len(answer) + 1) for answer in answers]
    forest.grow(numbers, answers, Kind.SAMPLED, log_probs=log_probs, versions=range(5))
    forest.grow(numbers[:1], [ids(8)], Kind.ENVIRONMENT)
    outcomes = [
        Outcome.scored(0.1, {"digits": 0.1, "style ☂": -1.0}),
        Outcome.abstained("nobody knows \udc80"),
        Outcome.error("it broke\n"),
        Outcome.timed_out("too long"),
        None,
    ]
    stops = [StopReason.EOS, StopReason.NEW_TOKENS, StopReason.ERROR, StopReason.TIMEOUT, None]
    for rollout, outcome, stop in zip(forest.rollouts, outcomes, stops, strict=True):
        rollout.outcome, rollout.stop, rollout.advantage = outcome, stop, 0.1 * rollout.member
    td = TensorDict(
        {
            "tokens": torch.tensor([[1, 2], [1, 4]]),
            "attention_mask": torch.tensor([[1, 1], [0, 1]]),
            "tokens_response": torch.tensor([[5, 6], [7, 8]]).int(),
            "log_probs": torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.bfloat16),
            "extra": torch.rand(2, 3, dtype=torch.float64),
            "next": {
                "tokens": torch.tensor([[1, 2, 5, 6], [1, 4, 7, 8]]),
                "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]),
                "reward": torch.tensor([[0.5], [1.0]]),
                "per_token": torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.jagged),
                "truncated": torch.tensor([[False], [True]]),
            },
        },
        [2],
    )
    forest.extend(td)
    return forest


def assert_same(found: Forest, expected: Forest) -> None:
    """Everything, numbers of nodes and order of children included."""
    assert found.same_as(expected)
    assert found.tokens.tolist() == expected.tokens.tolist()
    for node in range(expected.node_count):
        for name in ("parent", "children", "depth", "hash"):
            assert getattr(found, name)(node) == getattr(expected, name)(node)
    for mine, theirs in zip(found.rollouts, expected.rollouts, strict=True):
        for name in ("group", "member", "prompt_index", "end", "stop", "outcome", "advantage", "segments", "total"):
            assert getattr(mine, name) == getattr(theirs, name), name
        for name in ("kinds", "log_probs", "versions"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
            assert getattr(mine, name).dtype == getattr(theirs, name).dtype
        assert (mine.steps is None) == (theirs.steps is None)
        if mine.steps is not None and theirs.steps is not None:
            assert (mine.steps.form, mine.steps.columns.keys()) == (theirs.steps.form, theirs.steps.columns.keys())
            for path, column in mine.steps.columns.items():
                assert torch.equal(column.values, theirs.steps.columns[path].values)
                assert column.values.dtype == theirs.steps.columns[path].values.dtype
    assert found.to_string() == expected.to_string()


@pytest.mark.parametrize("through_a_file", [False, True])
def test_a_round_trip_is_exact(tmp_path: Path, through_a_file: bool) -> None:
    forest = filled()
    if through_a_file:
        forest.save(tmp_path / "forest.safetensors")
        found = Forest.load(tmp_path / "forest.safetensors")
        assert [path.name for path in tmp_path.iterdir()] == ["forest.safetensors"]
    else:
        found = Forest.from_arrays(forest.to_arrays())
    assert_same(found, forest)
    for number in (5, 6):
        for key in (("next", "reward"), ("next", "per_token"), "tokens", "extra", "tokens_response"):
            [mine], [theirs] = found.rollout(number).unbind(0), forest.rollout(number).unbind(0)
            assert torch.equal(mine[key], theirs[key])
            assert mine[key].dtype == theirs[key].dtype


def test_a_loaded_forest_grows_like_the_one_that_was_saved() -> None:
    forest = filled()
    found = Forest.from_arrays(forest.to_arrays())
    for grown in (forest, found):
        grown.plant([ids(1, 2, 5, 6, 7, 7), ids(1, 3)], groups=[0, 0], members=[0, 1])
        grown.grow([1], [ids(2)], Kind.ENVIRONMENT)
    assert_same(found, forest)


def test_an_empty_forest_and_one_of_text() -> None:
    assert_same(Forest.from_arrays(Forest().to_arrays()), Forest())
    text = Forest()
    td = TensorDict({"text": NonTensorStack("a🌲"), "text_response": NonTensorStack("b")}, [1])
    text.extend(td.set("next", TensorDict({"text": NonTensorStack("a🌲b")}, [1])))
    found = Forest.from_arrays(text.to_arrays())
    assert (found.unit, found.rollout(0)[0]["next", "text"]) == ("text", "a🌲b")


def test_saving_a_few_rows_writes_only_their_tokens(tmp_path: Path) -> None:
    rows = [torch.arange(1000 * i, 1000 * i + 1000) for i in range(20)]
    forest = Forest()
    forest.plant(rows, groups=[0] * 20, members=range(20))
    small = forest.subset([3, 17])
    assert small.tokens.tolist() == [*rows[3].tolist(), *rows[17].tolist()]
    assert [rollout.member for rollout in small.rollouts] == [3, 17]
    path = tmp_path / "few.safetensors"
    small.save(path)
    of_each_token = 8 + 1 + 4 + 4  # the id; its kind, log-prob and version
    written = path.stat().st_size
    assert 2000 * of_each_token <= written < 2000 * of_each_token + 5000
    assert [array.numel() for name, array in load_file(path).items() if name == "nodes.tokens"] == [2000]
    assert Forest.load(path).same_as(small)


def test_a_subset_shares_prefixes_and_keeps_all_that_belongs_to_its_rollouts() -> None:
    forest = filled()
    small = forest.subset([6, 1, 0])
    assert [small.path(n).tolist() for n in range(3)] == [forest.path(n).tolist() for n in (6, 1, 0)]
    assert sorted(small.tokens.tolist()) == [1, 2, 4, 5, 6, 7, 7, 8, 8]
    for mine, number in zip(small.rollouts, (6, 1, 0), strict=True):
        theirs = forest.rollouts[number]
        assert (mine.outcome, mine.stop, mine.member) == (theirs.outcome, theirs.stop, theirs.member)
        np.testing.assert_array_equal(mine.log_probs, theirs.log_probs)
    small.grow([1], [ids(3)], Kind.ENVIRONMENT)
    assert forest.path(1).tolist() == [1, 2, 5, 6, 7]
    assert forest.subset(range(len(forest.rollouts))).same_as(forest)
    assert forest.subset([]).node_count == 1
    for wrong, message in (([0, 0], "twice"), ([7], "no rollout 7"), ([-1], "no rollout -1")):
        with pytest.raises(ForestError, match=message):
            forest.subset(wrong)


def test_another_hashing_is_found_out_and_the_right_one_is_taken() -> None:
    key = SipHash(bytes(16))
    forest = Forest(key)
    forest.plant([ids(1, 2), ids(1, 3)], groups=[0, 0], members=[0, 1])
    assert_same(Forest.from_arrays(forest.to_arrays(), key), forest)
    with pytest.raises(ForestError, match="hashing"):
        Forest.from_arrays(forest.to_arrays())


def test_a_token_that_changed_on_the_way_is_found_out() -> None:
    arrays = filled().to_arrays()
    arrays["nodes.tokens"][2] += 1
    with pytest.raises(ForestError, match="hashes"):
        Forest.from_arrays(arrays)


WRONG: dict[str, Any] = {
    "other arrays": (lambda arrays: arrays.pop("about"), "expected the arrays of a forest"),
    "a format of another time": (lambda arrays: arrays.update(about=torch.tensor([*b'{"format": "x"}']).byte()), "'x'"),
    "a lost column": (lambda arrays: arrays.pop("rollouts.kinds"), "lack 'rollouts.kinds'"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_arrays_that_are_no_forest_are_refused(wrong: Any) -> None:
    change, message = wrong
    arrays = filled().to_arrays()
    change(arrays)
    with pytest.raises(ForestError, match=message):
        Forest.from_arrays(arrays)


def test_a_torn_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "torn.safetensors"
    filled().save(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ForestError, match=r"torn\.safetensors"):
        Forest.load(path)
    save_file({"weights": torch.zeros(2)}, path)
    with pytest.raises(ForestError, match=r"found \['weights'\]"):
        Forest.load(path)


@pytest.mark.parametrize("seed", range(3))
def test_one_bit_that_changed_in_a_file_is_found_out(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "forest.safetensors"
    filled().save(path)
    written = path.read_bytes()
    drawn = np.random.default_rng(seed)
    for place in drawn.integers(len(written), size=100).tolist():
        damaged = bytearray(written)
        damaged[place] ^= 1 << int(drawn.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(ForestError, match=r"forest\.safetensors"):
            Forest.load(path)


def test_a_file_without_a_digest_is_refused(tmp_path: Path) -> None:
    save_file(filled().to_arrays(), tmp_path / "a.safetensors")
    with pytest.raises(ForestError, match="with its digest"):
        Forest.load(tmp_path / "a.safetensors")


def put(name: str, row: int, value: float) -> Any:
    return lambda arrays: arrays[name].__setitem__(row, value)


def cut(name: str) -> Any:
    return lambda arrays: arrays.update({name: arrays[name][:-1]})


def tell(change: Any) -> Any:
    """Change what the JSON says."""

    def changed(arrays: dict[str, Tensor]) -> None:
        about = json.loads(arrays["about"].numpy().tobytes().decode("utf-8", "surrogatepass"))
        change(about)
        arrays["about"] = torch.tensor([*json.dumps(about).encode()], dtype=torch.uint8)

    return changed


INCONSISTENT: dict[str, Any] = {
    "a parent that is not there": (put("nodes.parent", -1, 99), r"nodes\.parent, row \d+: .* found 99"),
    "parents in a circle": (put("nodes.parent", 1, 2), r"nodes\.parent, row \d"),
    "a root with a parent": (put("nodes.parent", 0, 1), r"nodes\.parent, row 0"),
    "a root with tokens": (put("nodes.size", 0, 1), r"nodes\.size, row 0"),
    "a node without tokens": (put("nodes.size", 2, 0), r"nodes\.size, row 2"),
    "a segment outside": (put("nodes.start", 1, 10**9), r"nodes\.start, row 1"),
    "a segment over another": (put("nodes.start", 2, 0), r"nodes\.start, row \d"),
    "fewer sizes": (cut("nodes.size"), r"nodes\.size: expected \d+ rows"),
    "a child twice": (put("nodes.children", 0, 2), r"nodes\.children, row \d"),
    "a child that is not there": (put("nodes.children", 0, 0), r"nodes\.children, row 0"),
    "tokens that are no integers": (
        lambda arrays: arrays.update({"nodes.tokens": arrays["nodes.tokens"].float()}),
        r"nodes\.tokens: expected torch\.int64",
    ),
    "an end that is not there": (put("rollouts.end", 0, 50), r"rollouts\.end, row 0"),
    "an end elsewhere": (put("rollouts.end", -1, 0), r"rollouts\.kinds: expected"),
    "a kind that there is not": (put("rollouts.kinds", 3, 77), r"rollouts\.kinds, row 3: .* found 77"),
    "a log-prob of a prompt": (put("rollouts.log_probs", 0, -1.0), r"rollouts\.log_probs, row 0"),
    "a version of a prompt": (put("rollouts.versions", 0, 3), r"rollouts\.versions, row 0"),
    "fewer groups": (cut("rollouts.group"), r"rollouts\.group: expected 7 rows"),
    "segments of another length": (put("rollouts.segments", 0, 1), r"rollouts\.segments, row 0"),
    "a negative count": (put("rollouts.segments.counts", 0, -1), r"rollouts\.segments\.counts, row 0"),
    "an action elsewhere": (put("steps.actions", 0, 1), r"steps\.starts, row 0"),
    "a step beyond the path": (put("steps.ends", 1, 9), r"steps\.starts, row 1"),
    "a column too short": (cut("columns.0"), r"columns\.0: expected"),
    "an array of nobody's": (lambda arrays: arrays.update(more=torch.zeros(1)), r"no table of a forest: \['more'\]"),
    "no tensor": (lambda arrays: arrays.update({"nodes.parent": [0]}), r"nodes\.parent: expected a tensor"),
    "no JSON": (lambda arrays: arrays.update(about=torch.tensor([255]).byte()), '"about": expected JSON'),
    "JSON that is no object": (lambda arrays: arrays.update(about=torch.tensor([*b"[]"]).byte()), "format"),
    "another unit": (tell(lambda about: about.update(unit="bytes")), '"about", unit'),
    "the unit of another": (tell(lambda about: about.update(unit="text")), '"about", forms, row 0'),
    "an unknown stop": (tell(lambda about: about["stops"].__setitem__(1, "tired")), '"about", stops, row 1'),
    "fewer outcomes": (tell(lambda about: about["outcomes"].pop()), '"about", outcomes: expected 7'),
    "a score that is not finite": (
        tell(lambda about: about["outcomes"][0].update(score=math.nan)),
        '"about", outcomes, row 0',
    ),
    "a dtype that is none": (tell(lambda about: about["forms"][0].update(token_dtype="save")), '"about", forms, row 0'),
    "a rollout played twice": (tell(lambda about: about["played"].__setitem__(1, [5, 0])), '"about", played, row 1'),
    "a form that is not there": (tell(lambda about: about["played"].__setitem__(0, [5, 9])), '"about", played, row 0'),
    "columns that are no list": (tell(lambda about: about.update(columns=3)), '"about", columns'),
}


@pytest.mark.parametrize("wrong", INCONSISTENT.values(), ids=INCONSISTENT.keys())
def test_arrays_that_do_not_fit_together_are_refused_by_table_and_row(wrong: Any) -> None:
    change, message = wrong
    arrays = filled().to_arrays()
    change(arrays)
    with pytest.raises(ForestError, match=message):
        Forest.from_arrays(arrays)


def test_a_column_of_other_lengths_is_refused() -> None:
    steps = []
    for start, answer in ((ids(1), ids(2, 3)), (ids(1, 2, 3), ids(4))):
        after = TensorDict({"tokens": torch.cat([start, answer])})
        steps.append(
            TensorDict({"tokens": start, "tokens_response": answer, "log_probs": -answer.float(), "next": after})
        )
    forest = Forest()
    forest.extend(lazy_stack(steps, 0), time=True)
    arrays = forest.to_arrays()
    assert Forest.from_arrays(arrays).same_as(forest)
    assert arrays["columns.0.lengths"].tolist() == [2, 1]
    for row, length, message in (
        (1, 9, r"columns\.0\.lengths, row 1: .* found 9"),
        (1, 0, r"columns\.0: expected 2 rows"),
    ):
        wrong = {name: array.clone() for name, array in arrays.items()}
        wrong["columns.0.lengths"][row] = length
        with pytest.raises(ForestError, match=message):
            Forest.from_arrays(wrong)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_whatever_is_changed_in_arrays_it_is_a_forest_or_a_forest_error(data: st.DataObject) -> None:
    arrays = filled().to_arrays()
    name = data.draw(st.sampled_from(sorted(arrays)))
    flat = arrays[name].view(-1)
    flat[data.draw(st.integers(0, len(flat) - 1))] = data.draw(st.sampled_from([-9, -1, 0, 1, 2, 5, 99]))
    try:
        found = Forest.from_arrays(arrays)
    except ForestError:
        return
    assert Forest.from_arrays(found.to_arrays()).same_as(found)
    assert len(found.to_string().splitlines()) == found.node_count


def test_what_is_done_to_the_arrays_afterwards_is_nothing_to_the_forest() -> None:
    arrays = filled().to_arrays()
    found = Forest.from_arrays(arrays)
    for array in arrays.values():
        array.zero_()
    assert found.to_arrays()["nodes.tokens"].any()
    assert {k: v.any().item() for k, v in found.to_arrays().items()} == {
        k: v.any().item() for k, v in Forest.from_arrays(filled().to_arrays()).to_arrays().items()
    }


def test_rollouts_of_one_step_from_rows_that_are_stacked_are_compared() -> None:
    prompts = [{"observation": ids(1)}, {"observation": ids(3, 3)}]
    env = LLMHashingEnv(5, eos_token_id=0).append_transform(DataLoadingPrimer(prompts))
    write: Any = lambda td: td.set("action", torch.zeros(2, 1).long())  # noqa: E731
    rollout = env.rollout(2, write, tensordict=TensorDict(batch_size=[2]), break_when_any_done=False)
    forest, again = Forest(), Forest()
    forest.extend(rollout)
    again.extend(rollout)
    assert forest.same_as(again)
    assert Forest.from_arrays(forest.to_arrays()).same_as(forest)
    again.extend(rollout)
    assert not forest.same_as(again)


def test_forests_that_differ_in_one_thing_are_not_the_same() -> None:
    forest = filled()
    for name, value in (("group", 9), ("outcome", Outcome.scored(0.2)), ("advantage", 5.0), ("stop", None)):
        other = filled_like(forest)
        setattr(other.rollouts[0], name, value)
        assert not forest.same_as(other), name
    for row in (ids(1, 2, 5, 4), ids(1)):  # another node, or one of the same tokens
        other = filled_like(forest)
        other.plant([row], groups=[0], members=[0])
        assert not forest.same_as(other)
    backwards = forest.subset(range(6, -1, -1))
    assert forest.same_as(backwards)
    assert backwards.same_as(forest)


def filled_like(forest: Forest) -> Forest:
    return Forest.from_arrays(forest.to_arrays())
