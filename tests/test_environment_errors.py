"""Every public entry point, given what it can not take: one clear error, and nothing is lost by it.

Each row of the table gives the exception and the parts of its message: what was expected, what was found, which key or
row, and what to do where that can be said. After the error a good call, on the same object, gives what it would have
given without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import nn
from torch.utils.data import DataLoader

from ramet.envs import (
    DataLoadingPrimer,
    EnvBase,
    KLRewardTransform,
    LLMEnv,
    LLMHashingEnv,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    Tokenizer,
    as_nested_tensor,
    as_padded_tensor,
    check_env_specs,
)
from ramet.errors import DataError, ForestError
from ramet.forest import Forest, SipHash
from ramet.models.tiny import tiny_llama, tiny_tokenizer
from ramet.ragged import Ragged, compact, pad, rows
from ramet.specs import Bounded, Categorical, Composite, NonTensor, Unbounded

pytestmark = pytest.mark.filterwarnings("ignore:eos_token_id")

TOKENIZER = tiny_tokenizer()
EOS = int(TOKENIZER.eos_token_id)
ints = torch.tensor
MASK = ints([True, False])


@dataclass(frozen=True)
class Case:
    """One wrong call on what `make` returns: the exception, parts of its message, and a good call with its answer."""

    wrong: Callable[[Any], Any]
    error: type[Exception]
    parts: tuple[str, ...]
    make: Callable[[], Any]
    good: Callable[[Any], Any]
    answer: Any


CASES: dict[str, Case] = {}
KINDS: defaultdict[str, set[str]] = defaultdict(set)


def section(
    entry: str, make: Callable[[], Any], good: Callable[[Any], Any], answer: Any
) -> Callable[[str, type[Exception], str, Callable[[Any], Any]], None]:
    """Return what adds rows for one entry point; `parts` of a message are separated by " | "."""

    def add(name: str, error: type[Exception], parts: str, wrong: Callable[[Any], Any]) -> None:
        label = f"{entry}: {name}"
        assert label not in CASES
        CASES[label] = Case(wrong, error, tuple(parts.split(" | ")), make, good, answer)
        KINDS[entry].add(name.split(",")[0])

    return add


def nothing() -> None:
    return None


def batch(**entries: Any) -> TensorDict:
    return TensorDict(entries, [2])


def objects(*items: Any) -> NonTensorStack:
    return NonTensorStack(*map(NonTensorData, items))


def jagged(*ids: list[int]) -> torch.Tensor:
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in ids]).jagged()


def read(td: TensorDictBase, key: Any) -> list[Any]:
    return [row.tolist() if isinstance(row, torch.Tensor) else row for row in rows(td, key)]


# LLMEnv, of tokens and of text.


def of_tokens(**options: Any) -> LLMEnv:
    return LLMEnv(**{"from_text": False, "eos_token_id": EOS, **options})


def prompts(**more: Any) -> TensorDict:
    return batch(tokens=ints([[1, 5], [1, 6]]), **more)


def stepped(env: EnvBase) -> list[Any]:
    return read(env.step(env.reset(prompts(tokens_response=ints([[7], [8]])))).get("next"), "tokens")


STEPPED = [[1, 5, 7], [1, 6, 8]]

llm = section("LLMEnv", nothing, lambda _: stepped(of_tokens(batch_size=2)), STEPPED)
llm("wrong key", TypeError, "unexpected keyword argument | 'tokn_key'", lambda _: of_tokens(tokn_key="x"))
llm("wrong shape", TypeError, "batch_size must be 0 or 1d | (2, 3)", lambda _: of_tokens(batch_size=(2, 3)))
llm("wrong value, a batch", ValueError, "batch_size must not be negative | -1", lambda _: of_tokens(batch_size=-1))
llm("wrong value, rewards", ValueError, "assign_reward | from_text=False", lambda _: LLMEnv(assign_reward=True))
llm("wrong value, flags", ValueError, "assign_done | from_text=False", lambda _: LLMEnv(assign_done=True))
llm("wrong value, a class of data", NotImplementedError, "as_llm_data | TensorDict", lambda _: LLMEnv(as_llm_data=True))

llm("wrong type, a batch", TypeError, "batch_size must be 0 or 1d | 'a'", lambda _: of_tokens(batch_size="a"))
llm("wrong value, a vocabulary", ValueError, "vocab_size must be | found 0", lambda _: of_tokens(vocab_size=0))
llm(
    "wrong type, an end", TypeError, "eos_token_id must be one token id | [1, 2]", lambda _: LLMEnv(eos_token_id=[1, 2])
)
llm("wrong type, a key", TypeError, "a string or a tuple of strings | 3", lambda _: of_tokens(token_key=3))
llm(
    "wrong value, an end", ValueError, "eos_token_id=100 | vocabulary of 10",
    lambda _: of_tokens(vocab_size=10, eos_token_id=100),
)  # fmt: skip
llm(
    "wrong key, one for two", ValueError, "a key of its own | 'tokens' | twice",
    lambda _: of_tokens(attention_key="tokens"),
)  # fmt: skip

reset = section("EnvBase.reset", of_tokens, stepped, STEPPED)
reset("wrong key", KeyError, "reset needs 'tokens' | primer", lambda env: env.reset(batch(ids=ints([[1], [2]]))))
reset("missing value", KeyError, "reset needs 'tokens' | primer", lambda env: env.reset())
reset(
    "wrong type, a mask", ValueError, "'_reset' must be bool | (2,) or (2, 1) | int64 tensor of shape (2)",
    lambda env: env.reset(prompts(_reset=ints([1, 0]))),
)  # fmt: skip
reset(
    "wrong type, a mask of strings", ValueError, "'_reset' must be bool | non-tensor data | ['a', 'b']",
    lambda env: env.reset(prompts(_reset=objects("a", "b"))),
)  # fmt: skip
reset(
    "wrong shape, a mask", ValueError, "'_reset' must be bool | (2, 1) | bool tensor of shape (2, 2)",
    lambda env: env.reset(prompts(_reset=torch.ones(2, 2, dtype=torch.bool))),
)  # fmt: skip
reset(
    "wrong shape", ValueError, "without batch or of batch size (B,) | found (1, 1)",
    lambda env: env.reset(TensorDict({"tokens": ints([[[1]]])}, [1, 1])),
)  # fmt: skip

reset("wrong type", TypeError, "expected a TensorDict, found a dict", lambda env: env.reset({}))
for name, dtype in (("wrong type, numbers", torch.float32), ("wrong type, flags", torch.bool)):
    reset(
        name, TypeError, "'tokens' must hold token ids, int64 | found",
        lambda env, dtype=dtype: env.reset(batch(tokens=ints([[1], [2]]).to(dtype))),
    )  # fmt: skip
reset(
    "wrong type, the mask of the tokens", TypeError, "'attention_mask' must be a mask of 'tokens' | float32",
    lambda env: env.reset(prompts(attention_mask=torch.ones(2, 2))),
)  # fmt: skip

locked = section("EnvBase.reset, locked", lambda: of_tokens(batch_size=2), stepped, STEPPED)
locked(
    "wrong shape", ValueError, "expected a TensorDict of batch size (2,) | found (3,)",
    lambda env: env.reset(TensorDict({"tokens": ints([[1]] * 3)}, [3])),
)  # fmt: skip

step = section("EnvBase.step", of_tokens, stepped, STEPPED)
step("missing value", KeyError, "action 'tokens_response' | let the policy write it", lambda env: env.step(prompts()))
step(
    "wrong key", KeyError, "observation 'tokens' | what reset or step_mdp returned",
    lambda env: env.step(batch(ids=ints([[1], [2]]), tokens_response=ints([[1], [2]]))),
)  # fmt: skip
for name, response, found in (
    ("wrong type, numbers", torch.zeros(2, 1), "float32 tensor of shape (2, 1)"),
    ("wrong type, strings", objects("a", "b"), "non-tensor data"),
    ("wrong shape", ints([1, 2]), "int64 tensor of shape (2)"),
):
    step(
        name, TypeError, f"'tokens_response' must hold token ids, an integer tensor (2, 'n') | jagged | found {found}",
        lambda env, response=response: env.step(prompts(tokens_response=response)),
    )  # fmt: skip
step(
    "wrong shape, ragged", ValueError, "without a mask | [1, 2] | pass the mask, or jagged tokens",
    lambda env: env.step(prompts(tokens_response=jagged([7], [8, 9]))),
)  # fmt: skip
step(
    "wrong shape, some rows", ValueError, "without a mask | [1, 0] | pass the mask, or jagged tokens",
    lambda env: env.step(prompts(tokens_response=ints([[7], [8]]), _step=MASK)),
)  # fmt: skip
step(
    "wrong type, a mask", ValueError, "'_step' must be bool | (2,) or (2, 1) | int64 tensor",
    lambda env: env.step(prompts(tokens_response=ints([[7], [8]]), _step=ints([1, 0]))),
)  # fmt: skip
step(
    "wrong shape, the mask of the tokens", ValueError, "mask of shape (2, 3) | tokens of (2, 2)",
    lambda env: env.step(
        prompts(tokens_response=ints([[7], [8]]), attention_mask=torch.ones(2, 3, dtype=torch.bool))
    ),
)  # fmt: skip


step(
    "wrong value, ids", ValueError, "'tokens_response', row 1 | from 0 to 9 | found 10",
    lambda _: of_tokens(vocab_size=10).step(prompts(tokens_response=ints([[7], [10]]))),
)  # fmt: skip
step(
    "wrong value, ragged ids", ValueError, "'tokens_response', row 1 | from 0 to 9 | found -1",
    lambda _: of_tokens(vocab_size=10).step(
        prompts(tokens_response=jagged([7], [8, -1]), attention_mask=torch.ones(2, 2).bool())
    ),
)  # fmt: skip
step("wrong type", TypeError, "expected a TensorDict, found a dict", lambda env: env.rand_action({}))
step("wrong type, a seed", TypeError, "a seed is a whole number | 'a'", lambda env: env.set_seed("a"))
step("missing value, a result", KeyError, "step_mdp needs what step returned", lambda env: env.step_mdp(prompts()))


def grown(env: EnvBase) -> list[Any]:
    td = env.reset(batch(text=["a", "b"], text_response=["c", "d"], tokens_response=ints([[7], [8]])))
    return read(env.step(td).get("next"), "text")


def texts(**more: Any) -> TensorDict:
    return batch(text=["a", "b"], **more)


text = section("EnvBase.step, text", lambda: LLMEnv(eos_token_id=EOS), grown, ["ac", "bd"])
text("missing value", KeyError, "step needs 'text_response' | there are ['text']", lambda env: env.step(texts()))
text(
    "missing value, tokens", RuntimeError, "'tokens_response' is missing | let the policy write them | eos_token_id",
    lambda env: env.step(texts(text_response=["c", "d"])),
)  # fmt: skip
text(
    "wrong key", KeyError, "step needs 'text' | there are ['text_response', 'words']",
    lambda env: env.step(batch(words=["a", "b"], text_response=["c", "d"])),
)  # fmt: skip
text(
    "wrong type", TypeError, "'text_response', row 1 | expected str, found int",
    lambda env: env.step(texts(text_response=objects("c", 3))),
)  # fmt: skip
text(
    "wrong type, a tensor", TypeError, "'text_response', row 0 | expected str, found a tensor",
    lambda env: env.step(texts(text_response=ints([1, 2]))),
)  # fmt: skip


def answer(td: TensorDictBase) -> TensorDictBase:
    return td.set("tokens_response", ints([[7], [8]]))


def played(env: EnvBase) -> list[Any]:
    return read(env.rollout(1, answer, tensordict=prompts()), ("next", "tokens"))


rollout = section("EnvBase.rollout", of_tokens, played, STEPPED)
rollout("wrong value", ValueError, "max_steps must be a whole number, at least 1 | found 0", lambda env: env.rollout(0))
rollout("wrong type, a policy", TypeError, "policy must be a function | 'p'", lambda env: env.rollout(1, "p"))
rollout("wrong type", ValueError, "max_steps must be a whole number | 1.5", lambda env: env.rollout(1.5))
rollout(
    "missing value", ValueError, "auto_reset=False needs the first state | pass it as tensordict",
    lambda env: env.rollout(1, auto_reset=False),
)  # fmt: skip
rollout(
    "missing value, an action", KeyError, "action 'tokens_response' | let the policy write it",
    lambda env: env.rollout(1, lambda td: None, tensordict=prompts()),
)  # fmt: skip
rollout("wrong key", KeyError, "'tokens' | primer", lambda env: env.rollout(1, tensordict=texts()))
rollout(
    "wrong shape", TypeError, "'tokens_response' | (2, 'n') | found int64 tensor of shape (2)",
    lambda env: env.rollout(1, lambda td: td.set("tokens_response", ints([1, 2])), tensordict=prompts()),
)  # fmt: skip


class Half(nn.Module):
    """A reference that gives each token a probability of 1/2."""

    in_keys, log_prob_key = ("tokens_response",), "log_probs"

    def log_prob(self, td: TensorDictBase) -> torch.Tensor:
        return torch.full(td["tokens_response"].shape, 0.5).log()


def counted(env: Any) -> Any:
    td = env.reset(prompts(tokens_response=ints([[7], [8]])))
    return env.step(td)["next", "step_count"].tolist(), len(env.transform)


append = section(
    "TransformedEnv.append_transform",
    lambda: of_tokens().append_transform(StepCounter(3)).append_transform(StepCounter(3, step_count_key="n")),
    counted,
    ([[1], [1]], 2),
)
append(
    "wrong value", RuntimeError, "this StepCounter is already part of an environment | make another one",
    lambda env: env.append_transform(env.transform[0]),
)  # fmt: skip
append("wrong type", TypeError, "expected a Transform | found a NoneType", lambda env: env.append_transform(None))
append("wrong type, a class", TypeError, "found the class StepCounter", lambda env: env.append_transform(StepCounter))
append(
    "missing value", KeyError, "no 'reward' to add up | rewards are [] | append what makes the reward first",
    lambda env: env.append_transform(RewardSum()),
)  # fmt: skip
append(
    "wrong shape", ValueError, "expand_specs=False | (3,) | 'a' | (2,)",
    lambda env: of_tokens(batch_size=3).append_transform(
        TensorDictPrimer({"a": Unbounded((2,))}, expand_specs=False)
    ),
)  # fmt: skip


class Liar(EnvBase):
    """An environment that gives a float where its spec says an integer."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given = given
        self.observation_spec = Composite({"at": Unbounded((1,), dtype=torch.int64)})
        self.action_spec = Unbounded((1,))

    def _reset(self, td: TensorDictBase) -> TensorDict:
        return TensorDict({"at": self.given}, [])

    def _step(self, td: TensorDictBase) -> TensorDict:
        return TensorDict({"at": self.given}, [])


check = section("check_env_specs", of_tokens, lambda env: (check_env_specs(env), stepped(env))[1], STEPPED)
check(
    "wrong type", AssertionError, "reset: 'at' | expected Unbounded(shape=(1,), dtype=int64) | found float32 tensor",
    lambda _: check_env_specs(Liar(torch.zeros(1))),
)  # fmt: skip
check(
    "wrong shape", AssertionError, "reset: 'at' | expected Unbounded(shape=(1,) | found int64 tensor of shape (2)",
    lambda _: check_env_specs(Liar(ints([1, 2]))),
)  # fmt: skip
check(
    "wrong key", KeyError, "reset needs 'tokens' | primer",
    lambda env: check_env_specs(env, tensordict=texts()),
)  # fmt: skip


# Loaders.


def loaded(*args: Any, **options: Any) -> Any:
    return LLMEnv.from_dataloader(*args, **{"eos_token_id": EOS, **options})


dealt = section(
    "LLMEnv.from_dataloader", nothing, lambda _: read(loaded(["ab"], batch_size=2).reset(), "text"), ["ab"] * 2
)
dealt("wrong type", TypeError, "expected an iterable of rows | found the loader int 3", lambda _: loaded(3))
dealt("wrong type, a string", TypeError, "found a single str | put it into a list", lambda _: loaded("ab"))
dealt("wrong type, a dict", TypeError, "found a single dict | list", lambda _: loaded({"text": ["ab"]}))
dealt(
    "wrong type, a tokenizer", TypeError, "tokenizer must be one of transformers' | name | found int '3'",
    lambda _: loaded(["ab"], tokenizer=3),
)  # fmt: skip
dealt(
    "wrong key", ValueError, "token_key='tokens' | 'attention_mask' | found attention_key='m' | leave it out",
    lambda _: loaded(["ab"], tokenizer=TOKENIZER, attention_key="m"),
)  # fmt: skip
dealt("wrong shape", TypeError, "batch_size must be 0 or 1d | (2, 3)", lambda _: loaded(["ab"], batch_size=(2, 3)))
dealt("missing value", KeyError, "reset needs 'text'", lambda _: loaded([{"prompt": "ab"}]).reset())
dealt("empty source", DataError, "list [] is empty | 0 rows | hint: check", lambda _: loaded([]))
dealt("wrong value", ValueError, "repeats must be a whole number | found 0", lambda _: loaded(["ab"], repeats=0))
dealt(
    "wrong value, text", DataError, "row 0 | text without a name | observes nothing | hint: name it",
    lambda _: loaded(["ab"], from_text=False).reset(),
)  # fmt: skip
dealt(
    "wrong value, tokens", DataError, "row 0 | tokens without a name | observes nothing | hint: name it",
    lambda _: loaded([ints([1, 2])]).reset(),
)  # fmt: skip


class Flaky:
    """A loader whose second row can not be read the first time."""

    def __init__(self) -> None:
        self.broken = True

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> str:
        if index == 1 and self.broken:
            self.broken = False
            raise OSError("the disk is gone")
        return "abc"[index]


def two(env: EnvBase) -> list[Any]:
    return read(env.reset(TensorDict(batch_size=[2])), "text")


flaky = section("LLMEnv.from_dataloader, reset", lambda: loaded(Flaky()), two, ["a", "b"])
flaky("broken source", OSError, "the disk is gone", two)
rest = section("LLMEnv.from_dataloader, masks", lambda: loaded(["a", "b"]), two, ["a", "b"])
rest(
    "wrong value", RuntimeError, "reset must have at least one True value.",
    lambda env: env.reset(batch(_reset=torch.zeros(2, 1, dtype=torch.bool))),
)  # fmt: skip
rest(
    "wrong type", ValueError, "'_reset' must be bool | (2, 1) | int64 tensor",
    lambda env: env.reset(batch(_reset=ints([1, 0]))),
)  # fmt: skip
rest("missing value", KeyError, "'text' is missing | partial reset", lambda env: env.reset(batch(_reset=MASK)))


def primed(primer: DataLoadingPrimer) -> list[Any]:
    return read(primer(TensorDict(batch_size=[2])), "x")


def texts_of(*items: Any, **options: Any) -> Callable[[], DataLoadingPrimer]:
    return lambda: DataLoadingPrimer(list(items), **options)


def dealer(name: str, make: Callable[[], Any], wrong: Any, error: type[Exception], parts: str, left: Any) -> None:
    """Add a row of a primer: after the error it deals `left`."""
    section(f"DataLoadingPrimer, {name}", make, primed, left)(name, error, parts, wrong)


good_rows = texts_of({"x": "a"}, {"x": "b"})
for name, options, error, parts in (
    ("wrong key", {"data_keys": "x"}, ValueError, "data_keys must be a list of different keys | found 'x'"),
    ("wrong value", {"stack_method": "as_list"}, ValueError, "Unknown stack_method 'as_list' | 'as_nested_tensor'"),
    ("wrong type", {"repeats": 1.5}, ValueError, "repeats must be a whole number of at least 1 | found 1.5"),
    ("contradiction", {"use_buffer": False, "repeats": 2}, ValueError, "use_buffer=False | takes no repeats"),
    ("wrong shape", {"batch_size": (2, 3)}, TypeError, "batch_size must be 0 or 1d | (2, 3)"),
):
    dealer(name, good_rows, lambda _, o=options: DataLoadingPrimer(["a"], **o), error, parts, ["a", "b"])


def wrong_row(row: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a call that asks for a good row and a wrong one, of a loader of its own."""

    def ask(_: Any) -> Any:
        return DataLoadingPrimer([{"x": ints(1)}, row], **options)(TensorDict(batch_size=[2]))

    return ask


dealer(
    "row of other keys", good_rows, wrong_row({"y": 1}), DataError,
    "row 1 of the loader list | other keys than row 0: missing ['x'], more ['y'] | hint: each row", ["a", "b"],
)  # fmt: skip
dealer(
    "row of another type", good_rows, wrong_row({"x": "b"}), DataError,
    "row 1 of the loader list | 'x': expected int64 tensor of shape () | found str", ["a", "b"],
)  # fmt: skip
dealer(
    "row of another dtype", good_rows, wrong_row({"x": 0.5}), DataError,
    "row 1 of | 'x': expected int64 tensor | found float32 tensor of shape () | hint: rows must be of one dtype",
    ["a", "b"],
)  # fmt: skip
dealer(
    "columns", good_rows, lambda _: DataLoadingPrimer([("a", 1, 2)], data_keys=["x", "y"])(TensorDict()), DataError,
    "row 0 of | expected items of 2 columns, ['x', 'y']: found 3 | hint: data_keys", ["a", "b"],
)  # fmt: skip
dealer(
    "missing column", good_rows, lambda _: DataLoadingPrimer([{"y": 1}], data_keys=["x"])(TensorDict()), DataError,
    "row 0 of | no 'x', which data_keys names | it has ['y']", ["a", "b"],
)  # fmt: skip
dealer(
    "exhausted source", lambda: DataLoadingPrimer(iter([{"x": "a"}, {"x": "b"}])),
    lambda primer: primer(TensorDict(batch_size=[3])), DataError,
    "list_iterator | is exhausted: it gave 2 items and can be read once | hint: pass something", ["a", "b"],
)  # fmt: skip
dealer(
    "size of a batch that is passed on",
    lambda: DataLoadingPrimer(DataLoader([{"x": "a"}, {"x": "b"}], batch_size=2), use_buffer=False),  # type: ignore[arg-type]
    lambda primer: primer(TensorDict(batch_size=[3])), ValueError,
    "gives a batch of 2, and 3 rows are reset | use_buffer=True", ["a", "b"],
)  # fmt: skip
dealer(
    "state of an iterator", lambda: DataLoadingPrimer(iter([{"x": "a"}, {"x": "b"}])),
    lambda primer: primer.state_dict(), DataError,
    "can be read once: it has no state | hint: pass something that can be iterated again", ["a", "b"],
)  # fmt: skip


def other_state(primer: DataLoadingPrimer) -> None:
    other = DataLoadingPrimer([{"x": "c"}, {"x": "d"}])
    other(TensorDict(batch_size=[3]))
    primer.load_state_dict(other.state_dict())


dealer(
    "state of another loader", good_rows, other_state, DataError, "another row | hint: resume over the same data",
    ["a", "b"],
)  # fmt: skip
dealer(
    "batch of the environment", good_rows,
    lambda _: LLMEnv(batch_size=3).append_transform(DataLoadingPrimer(["a"], batch_size=2)), ValueError,
    "batches of (2,) | batch size (3,) | batch_size=2", ["a", "b"],
)  # fmt: skip


# Transforms.


def filled(primer: TensorDictPrimer) -> Any:
    return primer(TensorDict(batch_size=[2]))["a"].tolist()


SPEC = {"a": Unbounded((2,))}
fill = section("TensorDictPrimer", lambda: TensorDictPrimer(SPEC, default_value=1.0), filled, [[1.0, 1.0]] * 2)
fill("missing value", ValueError, "primers must map at least one key | found none", lambda _: TensorDictPrimer())
fill(
    "wrong key", ValueError, "default_value has ['b'] | specs for ['a']",
    lambda _: TensorDictPrimer(SPEC, default_value={"b": 1.0}),
)  # fmt: skip
fill(
    "contradiction", ValueError, "random=True | takes no default_value",
    lambda _: TensorDictPrimer(SPEC, random=True, default_value=1.0),
)  # fmt: skip
fill(
    "wrong type", ValueError, "single_default_value=True needs a function | found 1.0",
    lambda _: TensorDictPrimer(SPEC, single_default_value=True, default_value=1.0),
)  # fmt: skip
fill(
    "wrong type, a dtype", ValueError, "the value of 'a' | expected Unbounded(shape=(2,) | found int64 tensor",
    lambda _: filled(TensorDictPrimer(SPEC, default_value=lambda: ints([1, 2]))),
)  # fmt: skip
fill(
    "wrong shape", ValueError, "the value of 'a' | expected Unbounded(shape=(2,) | found float32 tensor",
    lambda _: filled(TensorDictPrimer(SPEC, default_value=lambda: torch.zeros(3))),
)  # fmt: skip
fill(
    "missing value, a key", ValueError, "default_value must return all keys | 'a' is missing",
    lambda _: filled(
        TensorDictPrimer(SPEC, single_default_value=True, default_value=lambda reset: TensorDict(batch_size=[2]))
    ),
)  # fmt: skip


def tokenizing(**options: Any) -> Tokenizer:
    return Tokenizer(["text"], ["tokens"], ["said"], ["ids"], **{"tokenizer": TOKENIZER, **options})


token = section(
    "Tokenizer", lambda: tokenizing(missing_tolerance=False),
    lambda t: (read(t(batch(text=["ab", "c"])), "tokens"), read(t.inv(batch(ids=ints([[14], [15]]))), "said")),
    ([[14, 15], [16]], ["a", "b"]),
)  # fmt: skip
token("missing value", TypeError, "'tokenizer'", lambda _: Tokenizer(["text"], ["tokens"]))  # type: ignore[call-arg]
token("missing value, text", KeyError, "'text' | missing: there are ['x']", lambda t: t(batch(x=ints([1, 2]))))
token("missing value, ids", KeyError, "'ids' | missing: there are ['x']", lambda t: t.inv(batch(x=ints([1, 2]))))
token("wrong type", TypeError, "tokenizer must be | no default | int '3'", lambda _: tokenizing(tokenizer=3))
token(
    "wrong type, keys",
    TypeError,
    "in_keys must be a list | 'text'",
    lambda _: Tokenizer("text", [], tokenizer=TOKENIZER),
)
token("wrong type, row", TypeError, "'text', row 1: expected str, found int", lambda t: t(batch(text=objects("a", 3))))
token(
    "wrong type, text", TypeError, "'text', row 0: expected str, found a tensor", lambda t: t(batch(text=ints([1, 2])))
)
token(
    "wrong type, ids", TypeError, "'ids' must hold token ids | found float32 tensor of shape (2, 1)",
    lambda t: t.inv(batch(ids=torch.zeros(2, 1))),
)  # fmt: skip
token(
    "wrong key", ValueError, "text and its tokens need a key each | 'text'",
    lambda _: Tokenizer(["text"], ["text"], tokenizer=TOKENIZER),
)  # fmt: skip
token("wrong type, a dict", TypeError, "expected a TensorDict, found a dict", lambda t: t({"text": ["a", "b"]}))
token("wrong type, a length", ValueError, "max_length must be at least 1 | 'a'", lambda _: tokenizing(max_length="a"))
token("wrong value", ValueError, "max_length must be at least 1 | found 0", lambda _: tokenizing(max_length=0))
token(
    "wrong shape", ValueError, "'tokens' have [1, 2] tokens | return_attention_mask=True, or padding=False",
    lambda _: tokenizing(return_attention_mask=False)(batch(text=["a", "bc"])),
)  # fmt: skip


def penalised(env: EnvBase) -> Any:
    td = env.reset(prompts()).update({"tokens_response": ints([[7], [8]]), "log_probs": torch.zeros(2, 1)})
    return env.step(td)["next", "paid"].flatten().tolist()


def with_penalty() -> Any:
    return of_tokens().append_transform(KLRewardTransform(Half(), out_keys=["paid"]))


class Weighted(Half):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.zeros(1, requires_grad=True)


penalty = section("KLRewardTransform", with_penalty, penalised, [pytest.approx(-0.6931472)] * 2)
replayed = {"tokens_response": ints([[7], [8]]), "log_probs": torch.zeros(2, 1)}
penalty("wrong type, a number", TypeError, "coef must be one number | 'a'", lambda _: KLRewardTransform(Half(), "a"))
penalty(
    "wrong type, a language model", TypeError, "takes ids | ramet.TransformersScorer",
    lambda _: KLRewardTransform(tiny_llama(TOKENIZER)),
)  # fmt: skip
penalty("wrong type", TypeError, "actor must be a module | NoneType", lambda _: KLRewardTransform(None))
penalty(
    "wrong key",
    ValueError,
    "in_keys must hold one key | ['a', 'b']",
    lambda _: KLRewardTransform(Half(), in_keys=["a", "b"]),
)
penalty("wrong key, out", ValueError, "out_keys | ['a', 'b']", lambda _: KLRewardTransform(Half(), out_keys=["a", "b"]))
penalty(
    "wrong value", ValueError, "coef must be one number | shape (2)", lambda _: KLRewardTransform(Half(), ints([1, 2]))
)
penalty(
    "wrong value, placement",
    ValueError,
    '"last" or "spread" | \'first\'',
    lambda _: KLRewardTransform(Half(), placement="first"),
)  # type: ignore[arg-type]
penalty(
    "wrong value, a tensor",
    ValueError,
    "'weight' requires gradients and is no Parameter | functional=False",
    lambda _: KLRewardTransform(Weighted()),
)
penalty(
    "missing value",
    ValueError,
    "action_key is required | pass action_key=",
    lambda _: KLRewardTransform(Half())(batch(**replayed)),
)
penalty(
    "missing value, an action", RuntimeError, "action 'tokens_response' is missing | let the policy write it",
    lambda env: env.transform(prompts()),
)  # fmt: skip
penalty(
    "missing value, log-probs", KeyError, "'log_probs', are missing | let the policy write them",
    lambda env: env.step(prompts(tokens_response=ints([[7], [8]]))),
)  # fmt: skip
penalty(
    "wrong shape", ValueError, "'log_probs' and the reference's | (2, 3) | (2, 1)",
    lambda env: env.step(prompts(tokens_response=ints([[7], [8]]), log_probs=torch.zeros(2, 3))),
)  # fmt: skip
penalty(
    "wrong shape, a reward", ValueError, "'reward' and the log-probs | (2, 3) | (2, 1)",
    lambda env: env.transform(batch(**replayed, reward=torch.zeros(2, 3))),
)  # fmt: skip

added = section("RewardSum", RewardSum, lambda t: t(batch(reward=torch.ones(2)))["episode_reward"].tolist(), [1.0, 2.0])
added(
    "wrong key",
    ValueError,
    "each in key needs one out key | ['a'] and ['b', 'c']",
    lambda _: RewardSum(["a"], ["b", "c"]),
)
added(
    "wrong key, resets",
    ValueError,
    "one reset key is needed | ['b', 'c']",
    lambda _: RewardSum(["a"], reset_keys=["b", "c"]),
)
added("missing value", KeyError, "no reward 'reward' to add up", lambda t: t(batch(x=torch.ones(2))))
added(
    "wrong shape",
    ValueError,
    "needs a dimension of time: found batch ()",
    lambda t: t(TensorDict({"reward": torch.ones(1)})),
)

count = section(
    "StepCounter",
    nothing,
    lambda _: counted(of_tokens().append_transform(StepCounter()).append_transform(StepCounter(step_count_key="n"))),
    ([[1], [1]], 2),
)
count("wrong value", ValueError, "max_steps must be a whole number, at least 1 | found 0", lambda _: StepCounter(0))

# Stacking and reading.


def item(**entries: Any) -> TensorDict:
    return TensorDict(entries, [])


ITEMS = [item(a=ints([1, 2])), item(a=ints([3]))]
for stack, shown in ((as_nested_tensor, [[1, 2], [3]]), (as_padded_tensor, [[1, 2], [0, 3]])):
    stacked = section(stack.__name__, nothing, lambda _, stack=stack: read(stack(ITEMS), "a"), shown)
    stacked("missing value", ValueError, "empty list | at least one", lambda _, stack=stack: stack([]))
    stacked(
        "wrong type", TypeError, "row 1: expected a TensorDict, found int", lambda _, stack=stack: stack([ITEMS[0], 3])
    )
    stacked(
        "wrong key",
        ValueError,
        "row 1 | missing ['a'], more ['b']",
        lambda _, stack=stack: stack([ITEMS[0], item(b=ints([1]))]),
    )
    stacked(
        "wrong type, a dtype",
        ValueError,
        "'a' | row 0 holds int64, row 1 holds float32",
        lambda _, stack=stack: stack([ITEMS[0], item(a=torch.zeros(1))]),
    )
    stacked(
        "wrong shape",
        ValueError,
        "'a' | row 0 has (2,), row 1 (1, 1)",
        lambda _, stack=stack: stack([ITEMS[0], item(a=ints([[1]]))]),
    )
    stacked(
        "wrong value",
        ValueError,
        "'a' differs along the dimensions | (1, 2) | (2, 3)",
        lambda _, stack=stack: stack([item(a=torch.zeros(1, 2)), item(a=torch.zeros(2, 3))]),
    )
stacked("wrong value, dim", ValueError, "dim must be >= 0 | -1", lambda _: as_padded_tensor(ITEMS, dim=-1))
stacked(
    "wrong value, stack_dim", ValueError, "stack_dim must be >= 0 | -1", lambda _: as_padded_tensor(ITEMS, stack_dim=-1)
)
stacked(
    "wrong value, far",
    ValueError,
    "'a' | (2,) | can not be stacked along 4",
    lambda _: as_padded_tensor(ITEMS, stack_dim=4),
)

reading = section(
    "rows", lambda: batch(tokens=ints([[1], [2]]), n=ints([1, 2])), lambda td: read(td, "tokens"), [[1], [2]]
)
reading("wrong key", KeyError, "no entry 'tokns' | there are ['n', 'tokens']", lambda td: rows(td, "tokns"))
reading("wrong key, nested", KeyError, "'tokens' holds no entries | ('x',)", lambda td: rows(td, ("tokens", "x")))
reading("missing value", KeyError, "no entry 'm' | there are", lambda td: rows(td, "tokens", mask="m"))
reading("wrong shape", ValueError, "'n' holds one number for each row | td['n']", lambda td: rows(td, "n"))
padding = section(
    "pad",
    lambda: batch(tokens=jagged([1], [2, 3]), text=["a", "b"]),
    lambda td: pad(td, "tokens", "left", 0)[0].tolist(),
    [[0, 1], [2, 3]],
)
padding("wrong key", KeyError, "no entry 'x' | there are ['text', 'tokens']", lambda td: pad(td, "x", "left", 0))
padding("wrong type", TypeError, "'text' holds str | read by rows", lambda td: pad(td, "text", "left", 0))
padding("wrong value", ValueError, '"left" or "right" | \'middle\'', lambda td: pad(td, "tokens", "middle", 0))  # type: ignore[arg-type]

# The hashing environment, and its hash.


def prefix(env: LLMHashingEnv) -> Any:
    td = env.reset(batch(observation=ints([[1], [2]]))).set("action", ints([[3], [4]]))
    return read(env.step(td).get("next"), "observation")


def start(**more: Any) -> TensorDict:
    return LLMHashingEnv(5).reset(batch(observation=ints([[1], [2]]))).update(more)


hashed = section("LLMHashingEnv", lambda: LLMHashingEnv(5), prefix, [[1, 3], [2, 4]])
hashed("wrong type, a module", TypeError, "hashing_module must map | 3", lambda _: LLMHashingEnv(5, hashing_module=3))
hashed("missing value", TypeError, "vocab_size is needed | tokenizer | pass one", lambda _: LLMHashingEnv())
hashed(
    "missing value, a tokenizer",
    ValueError,
    "text_output=True needs a tokenizer | pass one",
    lambda _: LLMHashingEnv(5, text_output=True),
)
hashed(
    "missing value, a prompt",
    RuntimeError,
    "requires a prompt | 'observation' | make_tensordict",
    lambda env: env.reset(),
)
hashed("missing value, an action", KeyError, "'action' | let the policy write it", lambda env: env.step(start()))
hashed(
    "missing value, a hash",
    KeyError,
    "'hashing' | what reset or step_mdp returned",
    lambda env: env.step(batch(observation=ints([[1], [2]]), action=ints([[1], [2]]))),
)
hashed("missing value, prompts", ValueError, "at least one prompt | empty list", lambda env: env.make_tensordict([]))
hashed("wrong key", RuntimeError, "requires a prompt | 'observation'", lambda env: env.reset(prompts()))
hashed(
    "wrong key, twice", ValueError, "a key of its own | 'action'", lambda _: LLMHashingEnv(5, observation_key="action")
)
hashed("wrong type", TypeError, "vocab_size must be a whole number | str 'a'", lambda _: LLMHashingEnv("a"))  # type: ignore[arg-type]
hashed(
    "wrong type, a prompt",
    TypeError,
    "'observation' must hold token ids | float32",
    lambda env: env.reset(batch(observation=torch.zeros(2, 1))),
)
hashed(
    "wrong type, strings",
    TypeError,
    "'observation' holds strings | no tokenizer | pass token ids",
    lambda env: env.make_tensordict("a"),
)
hashed(
    "wrong type, prompts",
    TypeError,
    "a string or a list of strings | ['a', 3]",
    lambda env: env.make_tensordict(["a", 3]),
)
hashed(
    "wrong type, an action",
    TypeError,
    "'action' must hold token ids | float32",
    lambda env: env.step(start(action=torch.zeros(2, 1))),
)
hashed(
    "wrong shape",
    ValueError,
    "'observation' | (2, 'L') | shape (2)",
    lambda env: env.reset(batch(observation=ints([1, 2]))),
)
hashed(
    "wrong shape, an action",
    ValueError,
    "'action' must hold one id | (2, 1) | shape (2)",
    lambda env: env.step(start(action=ints([1, 2]))),
)
hashed(
    "wrong value",
    ValueError,
    "eos_token_id must be in the vocabulary, 0 to 4 | 7",
    lambda _: LLMHashingEnv(5, eos_token_id=7),
)
hashed(
    "wrong value, a prompt",
    ValueError,
    "'observation' | 0 to 4 | found 7 | vocab_size",
    lambda env: env.reset(batch(observation=ints([[1], [7]]))),
)
hashed(
    "wrong value, an action",
    ValueError,
    "'action' | 0 to 4 | found 9 | vocab_size",
    lambda env: env.step(start(action=ints([[1], [9]]))),
)
hashed(
    "wrong value, a module",
    ForestError,
    "must map [1, 2] to [1] | found [1, 2] | hint: return one integer",
    lambda _: LLMHashingEnv(5, hashing_module=lambda x: x).reset(batch(observation=ints([[1], [2]]))),
)

sip = section("SipHash", SipHash, lambda sip: sip(ints([[1, 2]])).tolist(), [3978982813190876261])
sip("wrong type", TypeError, "key must be bytes | found str", lambda _: SipHash("a"))  # type: ignore[arg-type]
sip("wrong value", ValueError, "key must have 16 bytes | found 1", lambda _: SipHash(b"a"))
sip("wrong type, rows", TypeError, "rows must hold integers | float32", lambda sip: sip(torch.zeros(1, 2)))
sip("wrong shape", ValueError, "rows must be [N, k] | [2]", lambda sip: sip(ints([1, 2])))

# The forest.


def rolled(**more: Any) -> TensorDictBase:
    td = of_tokens().rollout(2, lambda td: td.set("tokens_response", ints([[7], [8]])), tensordict=prompts())
    for step in td.unbind(1):
        step.update(more)
    return td


def planted() -> Forest:
    forest = Forest()
    forest.extend(rolled())
    return forest


def grown_forest(forest: Forest) -> Any:
    return forest.extend(rolled()), forest.node_count, [forest.path(n).tolist() for n in range(4)]


FOREST = ([2, 3], 6, [[1, 5, 7, 7], [1, 6, 8, 8]] * 2)


def torn(name: str) -> Path:
    path = Path(name)  # in the folder of the test
    path.write_bytes(b"junk")
    return path


def another_hash(forest: Forest) -> Forest:
    path = torn("forest")
    forest.save(path)
    return Forest.load(path, SipHash(b"0" * 16))


def changed() -> TensorDictBase:
    td = rolled().clone()
    td[1, 1]["tokens"][0] = 9
    return td


extend = section("Forest.extend", planted, grown_forest, FOREST)
extend("wrong type, a hash", TypeError, "hashing must map | found 3", lambda _: Forest(3))
extend(
    "wrong type, nothing", TypeError, "expected a TensorDict, a rollout | NoneType", lambda forest: forest.extend(None)
)
extend("missing value", ForestError, "under \"next\" | ['tokens']", lambda f: f.extend(prompts()))
extend(
    "wrong key",
    ForestError,
    "no prefix with an action | 'tokens' | hint: | observation_key",
    lambda f: f.extend(rolled(), observation_key="o"),
)
extend(
    "wrong key, log-probs", ForestError, "no log-probs under ('lp',)", lambda f: f.extend(rolled(), log_prob_key="lp")
)
extend("wrong key, a mask", ForestError, "no entry ('m',)", lambda f: f.extend(rolled(), mask_key="m"))
extend(
    "wrong shape",
    ForestError,
    "row 0, step 0 | ('log_probs',) | 1 tokens | found 3",
    lambda f: f.extend(rolled(log_probs=torch.zeros(2, 3))),
)
extend(
    "wrong type",
    ForestError,
    "step 0, ('tokens',) | integers | torch.float32",
    lambda f: f.extend(
        batch(tokens=torch.zeros(2, 1), tokens_response=ints([[1], [2]]), next=batch(tokens=torch.zeros(2, 2)))
    ),
)
extend(
    "wrong value",
    ForestError,
    "row 1, step 1 | [9, 6, 8] | step 0 came back with, [1, 6, 8] | hint:",
    lambda f: f.extend(changed()),
)
tree = section("Forest.get_tree", planted, grown_forest, FOREST)
tree("wrong value", ForestError, "no node 99 | has 6", lambda f: f.get_tree(99))
tree(
    "missing value",
    ForestError,
    "no rollout begins with these 2 tokens | first 1 | 9 | hint: extend",
    lambda f: f.get_tree(ints([1, 9])),
)
tree("wrong type", ForestError, "the root | integers | torch.float32", lambda f: f.get_tree(torch.zeros(2)))
tree("wrong type, text", ForestError, "the text 'ab' | holds tokens | pass their ids", lambda f: f.get_tree("ab"))
tree("wrong shape", ForestError, "the root | 1 dimensions | [1, 2]", lambda f: f.get_tree(ints([[1, 5]])))
path = section(
    "Forest.rollout_from_path",
    planted,
    lambda f: read(f.rollout_from_path((0, 0, 0)), ("next", "tokens")),
    [[1, 5, 7], [1, 5, 7, 7]],
)
path("wrong type", TypeError, "a path is a sequence of positions | found 0", lambda f: f.rollout_from_path(0))
path(
    "wrong value",
    ForestError,
    "no path (7,) | 1 children | no child 7 | hint: valid_paths()",
    lambda f: f.rollout_from_path((7,)),
)
path(
    "missing value",
    ForestError,
    "path (0, 0, 0) has 1 rollouts | which=5",
    lambda f: f.rollout_from_path((0, 0, 0), which=5),
)
load = section("Forest.load", planted, grown_forest, FOREST)
load("missing value", FileNotFoundError, "nowhere", lambda f: Forest.load("nowhere"))
load(
    "broken source",
    ForestError,
    "torn.forest is not a whole safetensors file",
    lambda f: Forest.load(torn("torn.forest")),
)
load("wrong value", ForestError, "hashes | not those of their tokens | hint: pass the hashing", another_hash)

# Specs.

spec = section(
    "specs",
    lambda: Composite({"a": Bounded(0, 3, (2,), dtype=torch.int64)}),
    lambda s: s.is_in(TensorDict({"a": ints([0, 3])})),
    True,
)
spec("wrong key", KeyError, "no spec for 'b' | there are ['a']", lambda s: s["b"])
spec("wrong key, nested", KeyError, "no spec for ('a', 'b') | 'a' holds Bounded(0, 3", lambda s: s["a", "b"])
spec(
    "wrong key, to set",
    KeyError,
    "'a' holds Bounded | nothing can be put under ('a', 'b')",
    lambda s: s.__setitem__(("a", "b"), NonTensor()),
)
spec("wrong key, to delete", KeyError, "no spec for 'b' | there are ['a']", lambda s: s.__delitem__("b"))
spec(
    "wrong shape",
    ValueError,
    "the shape of 'a' must start with the batch size (2,) | found (3,)",
    lambda _: Composite({"a": Unbounded((3,))}, shape=(2,)),
)
spec("wrong shape, larger", ValueError, "(2,) does not expand to (2, 4)", lambda s: s["a"].expand(2, 4))
spec("wrong value", ValueError, "low=3, high=1", lambda _: Bounded(3, 1))
spec("wrong value, classes", ValueError, "n must be at least 1: found 0", lambda _: Categorical(0))


def message_of(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) else str(error)


@pytest.mark.parametrize("label", CASES)
def test_what_can_not_be_taken_is_refused_in_words_and_nothing_is_lost(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    case = CASES[label]
    made = case.make()
    with pytest.raises(case.error) as raised:
        case.wrong(made)
    assert type(raised.value) is case.error
    message = message_of(raised.value)
    assert [part for part in case.parts if part not in message] == [], message
    assert case.good(made) == case.answer


def test_compact_takes_whatever_rows_there_are() -> None:
    """It refuses nothing that a TensorDict can hold: no rows, no tokens, and text."""
    td = TensorDict({"tokens": jagged([], []), "text": ["", "a"]}, [2])
    assert read(compact(td), "tokens") == [[], []]
    assert read(compact(td), "text") == ["", "a"]
    assert compact(TensorDict({}, [0])).batch_size == (0,)


ENTRY_POINTS = [
    "LLMEnv",
    "EnvBase.reset",
    "EnvBase.step",
    "EnvBase.rollout",
    "TransformedEnv.append_transform",
    "check_env_specs",
    "LLMEnv.from_dataloader",
    "DataLoadingPrimer",
    "TensorDictPrimer",
    "Tokenizer",
    "KLRewardTransform",
    "RewardSum",
    "StepCounter",
    "as_nested_tensor",
    "as_padded_tensor",
    "rows",
    "pad",
    "LLMHashingEnv",
    "SipHash",
    "Forest.extend",
    "Forest.get_tree",
    "Forest.rollout_from_path",
    "Forest.load",
    "specs",
]


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_each_entry_point_is_given_several_kinds_of_wrong_things(entry: str) -> None:
    kinds = {kind for name, found in KINDS.items() if name.split(",")[0] == entry for kind in found}
    assert len(kinds) >= (1 if entry == "StepCounter" else 2), kinds
