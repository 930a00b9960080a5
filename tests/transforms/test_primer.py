"""Keys that are filled at reset, in the rows that are reset."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from ramet.envs.check import check_env_specs
from ramet.envs.llm import LLMEnv
from ramet.specs import Bounded, Composite, NonTensor, Unbounded
from ramet.transforms.primer import TensorDictPrimer

STATE = {"state": Unbounded((3,))}


def env_with(batch_size=2, prompts=True, **options):
    env = LLMEnv(from_text=False, eos_token_id=9, vocab_size=20, batch_size=batch_size)
    if prompts:
        env = env.append_transform(
            TensorDictPrimer(
                {"tokens": Unbounded((2,), dtype=torch.int64), "attention_mask": Bounded(0, 1, (2,), dtype=torch.bool)},
                default_value={"tokens": 5, "attention_mask": True},
                call_before_env_reset=True,
            )
        )
    return env.append_transform(TensorDictPrimer(**options))


def partial(env, td, flags):
    return env.reset(td.copy().set("_reset", torch.tensor(flags)))


@pytest.mark.parametrize("size", [None, 1, 2])
def test_constants_fill_the_keys_and_stay_through_steps(size):
    """0.0 is the default; the specs say what is there."""
    env = env_with(size, primers={**STATE, "note": NonTensor(example_data="x"), "n": Unbounded((), dtype=torch.int64)},
                   default_value={"n": 7})  # fmt: skip
    td = env.reset()
    assert td["state"].tolist() == ([0.0] * 3 if size is None else [[0.0] * 3] * size)
    assert torch.all(td["n"] == 7)
    assert env.observation_spec["state"].shape == (*env.batch_size, 3)
    assert env.observation_spec["note"].example_data == "x"
    td = env.rand_step(td)
    assert torch.equal(td["next", "state"], td["state"])
    check_env_specs(env)


def test_only_rows_named_by_reset_are_filled_anew():
    """By a function that is called once for each reset; the others keep what the episode made of it."""
    calls = []

    def count():
        calls.append(len(calls))
        return torch.full((3,), float(calls[-1]))

    env = env_with(3, primers=STATE, default_value=count)
    td = env.reset()
    assert td["state"].tolist() == [[0.0] * 3] * 3
    td["state"] = td["state"] + torch.tensor([[10.0], [20.0], [30.0]])
    td = partial(env, td, [False, True, False])
    assert td["state"].tolist() == [[10.0] * 3, [1.0] * 3, [30.0] * 3]
    td = partial(env, td, [[True], [False], [True]])
    assert td["state"].tolist() == [[2.0] * 3, [1.0] * 3, [2.0] * 3]
    assert partial(env, td, [False] * 3)["state"].tolist() == td["state"].tolist()
    assert len(calls) == 3


@pytest.mark.parametrize("before", [False, True])
def test_text_is_filled_in_the_rows_that_are_reset(before):
    """Each row its own, if the function returns a list of them."""
    texts = iter([["a", "b"], ["c"]])
    env = LLMEnv(eos_token_id=9, batch_size=2).append_transform(
        TensorDictPrimer(
            {"text": NonTensor(example_data="x")}, default_value=lambda: next(texts), call_before_env_reset=True
        )
    )
    td = env.reset()
    assert td.get("text").tolist() == ["a", "b"]
    assert partial(env, td, [False, True]).get("text").tolist() == ["a", "c"]


def test_call_before_env_reset_serves_prompts():
    """Without it the environment's own reset misses them."""
    prompt = {"tokens": Unbounded((2,), dtype=torch.int64)}
    options = {"primers": prompt, "default_value": 3, "prompts": False}
    assert env_with(**options, call_before_env_reset=True).reset()["tokens"].tolist() == [[3, 3]] * 2
    with pytest.raises(KeyError, match="primer"):
        env_with(**options).reset()


def test_single_default_value_makes_all_keys_for_the_rows_that_are_reset():
    """It is told which those are."""
    seen = []

    def make(reset=None):
        seen.append(None if reset is None else reset.tolist())
        count = 3 if reset is None else int(reset.sum())
        return TensorDict({"state": torch.full((count, 3), float(len(seen)))}, [count])

    env = env_with(3, primers=STATE, default_value=make, single_default_value=True)
    td = partial(env, env.reset(), [False, True, True])
    assert td["state"][:, 0].tolist() == [1, 2, 2]
    assert seen == [None, [False, True, True]]


def test_random_draws_from_the_specs_are_fixed_by_the_seed_and_touch_no_global_state():
    """Two environments with one seed are alike."""
    spec = {"x": Bounded(2, 1000, (4,), dtype=torch.int64)}
    envs = [env_with(primers=spec, random=True) for _ in range(2)]
    before = torch.get_rng_state()
    for env in envs:
        env.set_seed(3)
    a, b = (env.reset()["x"] for env in envs)
    assert torch.equal(a, b)
    assert spec["x"].expand(2, 4).is_in(a)
    assert not torch.equal(envs[0].reset()["x"], a)
    assert torch.equal(before, torch.get_rng_state())
    check_env_specs(envs[0])


def test_specs_of_a_row_of_the_batch_and_of_a_composite():
    """Of one row, whatever the batch size, unless expand_specs=False or a Composite says otherwise."""
    assert env_with(primers={"x": Unbounded((2, 3))}).reset()["x"].shape == (2, 2, 3)
    assert env_with(primers={"x": Unbounded((2,))}, expand_specs=True).reset()["x"].shape == (2, 2)
    assert env_with(primers={"x": Unbounded((2, 3))}, expand_specs=False).reset()["x"].shape == (2, 3)
    assert env_with(primers=Composite({"x": Unbounded((2, 3))}, shape=(2,))).reset()["x"].shape == (2, 3)
    assert env_with(primers={"a": {"x": Unbounded((3,))}}).reset()["a", "x"].shape == (2, 3)


def test_outside_an_environment_it_fills_what_it_is_called_with():
    """And reads its mask under its own key."""
    primer = TensorDictPrimer(STATE, default_value=1.0, reset_key="again")
    assert primer(TensorDict(batch_size=[2]))["state"].tolist() == [[1.0] * 3] * 2
    td = TensorDict({"state": torch.zeros(2, 3), "again": torch.tensor([True, False])}, [2])
    assert primer(td)["state"].tolist() == [[1.0] * 3, [0.0] * 3]


FAULTS = [
    ("no primers", lambda: TensorDictPrimer(), "at least one key"),
    ("both", lambda: TensorDictPrimer(STATE, random=True, default_value=1), "takes no default_value"),
    ("single", lambda: TensorDictPrimer(STATE, single_default_value=True), "needs a function as default_value"),
    ("unknown", lambda: TensorDictPrimer(STATE, default_value={"x": 1}), r"\['x'\], for which there is no spec"),
    ("shape", lambda: env_with(primers=STATE, default_value=lambda: torch.ones(2)).reset(), "'state' does not fit"),
    ("text", lambda: env_with(primers={"t": NonTensor(example_data="x")}, default_value=3).reset(), "'t' does not fit"),
    ("batch", lambda: env_with(primers=STATE, expand_specs=False), r"batch \(2,\): the spec of 'state' has .*\(3,\)"),
    ("composite", lambda: env_with(primers=Composite({"x": Unbounded((3,))}, shape=(3,))), r"\(3,\).*\(2,\)"),
    (
        "single td",
        lambda: env_with(primers=STATE, single_default_value=True, default_value=lambda reset: TensorDict()).reset(),
        r"of batch size \(2,\): found \(\)",
    ),
    (
        "single key",
        lambda: env_with(primers=STATE, single_default_value=True,
                         default_value=lambda reset: TensorDict({}, [2])).reset(),
        "'state' is missing",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "words"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_errors_say_what_was_expected_and_where(name, call, words):
    """ValueErrors that name the key."""
    with pytest.raises(ValueError, match=words):
        call()


def test_non_tensor_entries_may_come_as_such():
    """A function may return the entry itself."""
    env = env_with(primers={"t": NonTensor(example_data="x")}, default_value=lambda: NonTensorStack("a", "b"))
    assert env.reset().get("t").tolist() == ["a", "b"]


def test_a_partial_reset_of_what_has_nothing_to_keep_fills_all_rows():
    """There is no row without the keys afterwards."""
    td = TensorDict({"_reset": torch.tensor([True, False])}, [2])
    assert TensorDictPrimer(STATE, default_value=1.0)(td)["state"].tolist() == [[1.0] * 3] * 2


def test_what_is_filled_has_memory_of_its_own():
    """To write it in place does not change the constant, with a batch or without."""
    constant = torch.tensor([1, 2])
    primer = TensorDictPrimer({"n": Unbounded((2,), dtype=torch.int64)}, default_value=constant)
    for size in ([], [2]):
        primer(TensorDict(batch_size=size))["n"].add_(5)
    assert constant.tolist() == [1, 2]
