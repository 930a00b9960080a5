"""Fill the reset of an environment from a loader of rows.

Letters: n rows of a reset, r repeats, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from ramet.errors import DataError
from ramet.specs import Composite, KeyPath, NonTensor, Spec, Unbounded
from ramet.transforms.entries import as_batch_size
from ramet.transforms.env_specs import EnvSpecs
from ramet.transforms.loading.batches import (
    Layout,
    StackMethod,
    batch,
    by_method,
    carry,
    missing,
    named_rows,
    put_entries,
    put_rows,
    row_tds,
)
from ramet.transforms.loading.columns import Columns, Parts, bare_key, declared
from ramet.transforms.loading.items import Reader, Values, examples, rows_of, said_of_batches, turns_lists
from ramet.transforms.loading.sources import source_of
from ramet.transforms.loading.stream import Stream
from ramet.transforms.transform import Transform
from ramet.types import Key

_OWN = (Key.GROUP, Key.MEMBER)


class DataLoadingPrimer(Transform):
    """Fill the reset of an environment from a loader, before the environment's own reset.

    `dataloader` is an iterable of items, or a function that makes one. An item is a row, or a batch of rows: a mapping;
    a TensorDict; a tuple or list whose columns `data_keys` names (a single key takes the item as its column); a bare
    string, tensor or list of those, which goes under what the environment observes ("data" without one). Numbers,
    arrays and lists of numbers become tensors. A mapping in a mapping is nested entries if it holds a tensor or a known
    key, and one entry that is no tensor otherwise.

    Which it is, row or batch, a TensorDict says by its batch size, and a loader by its `batch_size` (0 or None: rows).
    The items of a `datasets` dataset are rows. Else the data says it, unless `auto_batch_size` is False, which takes
    rows: an item is a batch if its columns can have one length, and one of them must: a list of strings, lists or
    tensors; a tensor with more dimensions than a row of that key has, by its spec, or than one.

    Rows are read ahead one item at a time and dealt out in order, so the loader's batches and the environment's are
    independent. `batch_size` None takes the loader's, or that of the environment it is appended to; 0 is (). An
    environment without batch gets as many rows as the TensorDict that is reset has; for `reset()`, or a TensorDict
    without batch and entries, the primer's batch, one row if that is (). A partial reset pulls as many rows as
    `"_reset"` names, in row order. `repeats` gives each row so many times in a row; with `group_repeats` the batch
    grows to n*repeats and a reset of all rows gives whole groups (after a partial reset of no multiple of `repeats`
    rows, groups straddle: no row is dropped for it). `"group_id"` is the number of the row in the run, over all epochs,
    and `"repeat_index"` counts its repeats: int64 of the batch size, in the specs.

    `stack_method`: None gives a lazy stack of rows; "as_nested_tensor" jagged tensors; "as_padded_tensor" tensors
    padded with zeros on the left; a function makes a TensorDict of a list of those of the rows. Where no row has a
    tensor of one dimension or more, None gives an ordinary TensorDict, its text a `ramet.ragged.Text`: a lazy stack of
    strings to every reader. If the environment has an attention mask and the rows have none, one is made: every token
    of a row is real. Without any mask, rows that a partial reset makes wider get zeros on the left that count as tokens
    from then on, as all padding does. `use_buffer=False` passes the loader's batches on as they are, for resets of just
    their size.

    The keys of the first row are those of all: another row is a DataError that names it. `primers` and `data_specs`
    (one for each of `data_keys`) give specs of one row; else they are the environment's, or read off the first row,
    with any length in the first dimension. `example_data` is the example of text. Tensors keep their dtype unless a
    spec says otherwise: int32 tokens become the int64 of an `LLMEnv`. Rows are moved to `device` where the TensorDict
    has none.

    A loader that can be indexed or iterated again begins its next epoch when it runs out; an empty one, and an iterator
    that runs out, are a DataError that names it. An error of the loader loses no row: the next reset goes on, after
    reading the epoch again; where that can not be, a note of the error names the item that may be lost. `state_dict`
    and `load_state_dict` resume at the exact next row, in the middle of a group too: what can be indexed by a number,
    what can be iterated again by reading its epoch again (with a UserWarning), shuffled in the same order if a
    DataLoader has a generator of its own: that order is the primer's, whoever else draws from the generator. Copies and
    pickles go on likewise. DataError for an iterator, for an order that can not be had again, and where the loader has
    another row at that place.

    Strings, each twice, for a batch of three:

    >>> from ramet.envs.llm import LLMEnv
    >>> primer = DataLoadingPrimer(["1+1=", "2+2="], repeats=2)
    >>> env = LLMEnv(eos_token_id=9, batch_size=3).append_transform(primer)
    >>> td = env.reset()
    >>> list(td["text"]), td["group_id"].tolist(), td["repeat_index"].tolist()
    (['1+1=', '1+1=', '2+2='], [0, 0, 1], [0, 1, 0])
    >>> td["_reset"] = torch.tensor([False, True, False])
    >>> list(env.reset(td)["text"])
    ['1+1=', '2+2=', '2+2=']

    Tokens of any length, without a batch and with one; answers travel along, and a step keeps what it does not change:

    >>> rows = [{"tokens": torch.tensor(ids), "answer": sum(ids)} for ids in ([1, 2, 3], [4, 5])]
    >>> env = LLMEnv(from_text=False, eos_token_id=9).append_transform(DataLoadingPrimer(rows))
    >>> env.reset()["tokens"]
    tensor([1, 2, 3])
    >>> primer = DataLoadingPrimer(rows, stack_method="as_padded_tensor")
    >>> env = LLMEnv(from_text=False, eos_token_id=9, batch_size=2).append_transform(primer)
    >>> td = env.reset()
    >>> td["tokens"].tolist(), td["attention_mask"].int().tolist(), td["answer"].tolist()
    ([[1, 2, 3], [0, 4, 5]], [[1, 1, 1], [0, 1, 1]], [6, 9])
    >>> td = env.step(td.set("tokens_response", torch.tensor([[6], [9]])))
    >>> td["next", "tokens"].tolist(), td["next", "done"].tolist()
    ([[1, 2, 3, 6], [0, 4, 5, 9]], [[False], [True]])

    A DataLoader of batches of two, which tuples come from, in a rollout of one row after the other:

    >>> pairs = torch.utils.data.DataLoader([("2+2=", 4), ("3+3=", 6), ("4+4=", 8)], batch_size=2)
    >>> primer = DataLoadingPrimer(pairs, data_keys=["text", "answer"], batch_size=0)
    >>> env = LLMEnv(eos_token_id=9).append_transform(primer)
    >>> def policy(td):
    ...     td["text_response"], td["tokens_response"] = str(td["answer"].item()), torch.tensor([9])
    >>> rollout = env.rollout(3, policy, break_when_any_done=False)
    >>> list(rollout["next", "text"]), rollout["group_id"].tolist()
    (['2+2=4', '3+3=6', '4+4=8'], [0, 1, 2])

    A `datasets` dataset is given as it is, here for a batch of one:

    >>> from datasets import Dataset
    >>> questions = Dataset.from_dict({"text": ["2+2=", "3+3="], "answer": [4, 6]})
    >>> td = LLMEnv(eos_token_id=9, batch_size=1).append_transform(DataLoadingPrimer(questions)).reset()
    >>> list(td["text"]), td["answer"].tolist()
    (['2+2='], [4])

    A generator is read once, and its end is an error; a function that makes one is called for each epoch. An empty
    loader is refused, where its length is known at once, else by the first reset.

    >>> once = DataLoadingPrimer((letter for letter in "ab"), batch_size=2)
    >>> list(once(TensorDict())["data"])
    ['a', 'b']
    >>> list(DataLoadingPrimer(lambda: iter(["a", "b"]), batch_size=3)(TensorDict())["data"])
    ['a', 'b', 'a']
    >>> DataLoadingPrimer([])
    Traceback (most recent call last):
    ramet.errors.DataError: the loader list [] is empty: it gave 0 rows in epoch 0
      hint: check its length, the split or the filter
    """

    def __init__(
        self,
        dataloader: Any,
        *,
        primers: Composite | Mapping[KeyPath, Spec] | None = None,
        data_keys: Sequence[KeyPath] | None = None,
        data_specs: Sequence[Spec] | Mapping[KeyPath, Spec] | None = None,
        example_data: Any = None,
        stack_method: StackMethod | None = None,
        use_buffer: bool | None = None,
        auto_batch_size: bool = True,
        batch_size: int | Sequence[int] | None = None,
        repeats: int | None = None,
        group_repeats: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if stack_method not in (None, "as_nested_tensor", "as_padded_tensor") and not callable(stack_method):
            raise ValueError(
                f"Unknown stack_method {stack_method!r}: expected None, 'as_nested_tensor', 'as_padded_tensor' or a "
                "function that stacks a list of TensorDicts"
            )
        self.use_buffer = use_buffer is None or use_buffer
        if not self.use_buffer and (repeats is not None or stack_method is not None):
            raise ValueError(
                "use_buffer=False passes the loader's batches through: it takes no repeats or stack_method"
            )
        if repeats is not None and (isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1):
            raise ValueError(f"repeats must be a whole number of at least 1, or None: found {repeats!r}")
        self.repeats, self.group_repeats, self.stack_method = repeats or 1, group_repeats, stack_method
        self.data_keys = None if data_keys is None else _different(data_keys)
        self.data_specs, self.example_data = data_specs, example_data
        self.primers = None if primers is None else primers if isinstance(primers, Composite) else Composite(primers)
        self.auto_batch_size = auto_batch_size
        self.device = None if device is None else torch.device(device)
        source, made = source_of(dataloader)
        # An iterator that a function made is read once, and can not be copied.
        self.dataloader = dataloader if hasattr(made, "__next__") else made
        self._loader_batch, self._says_batches = said_of_batches(made)
        self._inferred = batch_size is None
        size = as_batch_size(self._loader_batch if batch_size is None else batch_size)
        self.batch_size = torch.Size(
            [(size[0] if size else 1) * repeats] if group_repeats and repeats is not None else size
        )
        self._unasked = self.batch_size  # what is drawn where no batch is asked for
        self._columns: Columns | None = None
        self._reader: Reader | None = None
        self._bare: dict[bool, KeyPath] = {}
        self._stream = Stream(source, self._reading, self._fit, self.repeats)

    # Where the rows come from.

    def reset_dataloader(self) -> None:
        """Begin the next epoch of the loader, at its first row.

        What was read ahead and not dealt is dropped, because the epoch that begins gives it again in its place; the
        rest of a group that was begun is dropped with it. Numbers under `group_id` go on. DataError for an iterator
        that rows were dealt from: it can not start over.
        """
        self._stream.start_over()

    def get_extra_state(self) -> dict[str, Any]:
        """Return where the next row stands: what `state_dict` holds. DataError where there is no way back to it."""
        return self._stream.state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go to where the state was saved: what `load_state_dict` does. DataError if another row is there."""
        self._stream.load(state)

    def set_seed(self, seed: int) -> None:
        """Seed the generators of a `torch.utils.data.DataLoader`: its own and its sampler's.

        The order changes with the next epoch; with this one, if nothing of it was dealt yet. A loader without a
        generator has its order from elsewhere, and keeps it.
        """
        self._stream.seed(seed)

    def attach(self, env: EnvSpecs) -> None:
        """Take `env` as the parent; ValueError if the two can not agree on a batch size."""
        size = env.batch_size
        if size and self.batch_size not in ((), size) and not self._inferred:
            raise ValueError(
                f"the primer deals batches of {tuple(self.batch_size)} and the environment has batch size "
                f"{tuple(size)}: make the environment with batch_size={self.batch_size[0]}, or leave out the primer's"
            )
        if len(size) > 1:
            raise ValueError(f"a loader fills environments of no or one batch dimension: found {tuple(size)}")
        super().attach(env)
        self._unasked, self.batch_size = size or self.batch_size, size
        self._stream.read_again()
        self._columns = self._reader = None
        self._bare.clear()

    def _fit(self, given: Values | list[Values], further: Iterator[Values]) -> Parts:
        """Return the columns of rows, of which the very first say what all are."""
        if self._columns is None:
            rows = rows_of(given)
            self._columns = self._columns_of(
                examples(rows, further, [*self._given, *([] if self._env is None else self._env.leaves())])
            )
        return self._columns.fitted(given, self._stream.numbered, self._stream.source.name)

    def _reading(self) -> Reader:
        if self._reader is None:
            env, given = self._env, self._given
            specs = (
                {}
                if env is None
                else {key: env[key]._but(shape=env[key].shape[len(env.shape) :]) for key in env.leaves()}
            )
            turned = turns_lists(self.dataloader)
            dims = {key: len(spec.shape) for key, spec in {**specs, **given}.items() if spec.dtype is not None}
            self._reader = Reader(
                self.data_keys, self._says_batches, self.auto_batch_size, self._bare_key, dims, turned
            )
        return self._reader

    @property
    def _env(self) -> Composite | None:
        return None if self.parent is None else self.parent.full_observation_spec

    @property
    def _given(self) -> dict[KeyPath, Spec]:
        keys, specs = self.data_keys, self.data_specs
        if keys is None and isinstance(specs, Sequence) and len(specs) == 1:
            keys = [self._bare_key(isinstance(specs[0], NonTensor))]
        return declared(self.primers, specs, keys, self.batch_size)

    @property
    def _known(self) -> Columns:
        """The columns of the rows, for which the first row is looked at, and stays the next."""
        if self._columns is None:
            self._stream.peek()
        assert self._columns is not None
        return self._columns

    @property
    def _keys(self) -> list[KeyPath]:
        return [*self._known.keys(), *_OWN]

    def _columns_of(self, first: Values) -> Columns:
        own = [key for key in _OWN if key in first]
        if own:
            raise DataError(
                f"the rows of {self._stream.source.name} have {own}, which the primer writes",
                hint="rename the column, or choose the others by data_keys",
            )
        env, pads = self.parent, self.stack_method == "as_padded_tensor" or callable(self.stack_method)
        return Columns(
            first,
            self._given,
            self._env,
            self.example_data,
            mask_key=env.mask_key if env is not None and pads else None,
            prompt=None if env is None else env.prompt_key,
        )

    def _bare_key(self, text: bool) -> KeyPath:
        """Name the column of a loader of bare strings, or tensors: what the environment observes of that kind."""
        if text not in self._bare:
            self._bare[text] = "data" if self.parent is None else bare_key(self.parent, text)
        return self._bare[text]

    # The way of a reset.

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Fill `td`, outside of any environment; one without batch and entries gets the primer's batch size."""
        return self._reset_env_preprocess(td)

    def _call(self, td: TensorDictBase) -> TensorDictBase:
        return td

    def _undo_reset(self) -> None:
        self._stream.take_back()

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        self._stream.settle()
        return td_reset

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        return carry(td, next_td, self._keys)

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        if self._unasked and not td.batch_size and not len(list(td.keys())):
            td = TensorDict({}, batch_size=self._unasked, device=td.device)
        if td.batch_dims > 1:
            raise ValueError(f"a loader fills no or one batch dimension: found {tuple(td.batch_size)}")
        mask = named_rows(td, "_reset")
        count = td.batch_size.numel() if mask is None else int(mask.sum())
        if mask is not None:
            absent = missing(td, self._keys)
            if absent is not None:
                raise KeyError(
                    f"{absent!r} is missing: a partial reset keeps the rows that '_reset' does not name, so it takes "
                    "what a whole reset has given"
                )
        elif self.group_repeats and count % self.repeats:
            raise ValueError(
                f"group_repeats=True gives whole groups of {self.repeats}, and a reset of {count} rows has no place "
                f"for them: use a batch of a multiple of {self.repeats}, or group_repeats=False"
            )
        td = self._filled(td, mask, count) if self.use_buffer else self._pass_through(td, mask, count)
        self._stream.take(count)
        return td

    def _filled(self, td: TensorDictBase, mask: Tensor | None, count: int) -> TensorDictBase:
        pieces, numbers = self._stream.look(count), self._numbers(count)
        places = numbers[Key.GROUP] - self._stream.dealt // self.repeats
        lazily = isinstance(td, LazyStackedTensorDict) or (self.stack_method is None and not self._known.plain)
        if td.batch_size and not lazily and not callable(self.stack_method):
            layout: Layout = "padded" if self.stack_method == "as_padded_tensor" else "jagged"
            entries = batch(self._known, pieces, None if self.repeats == 1 else places, layout)
            return self._put(td, {**entries, **numbers}, mask)
        device = self.device if td.device is None else td.device
        tds = row_tds(self._known, pieces, places, device)
        for row, group, member in zip(tds, *(numbers[key].unbind() for key in _OWN), strict=True):
            row.set(Key.GROUP, group).set(Key.MEMBER, member)
        if not td.batch_size:
            return self._put(td, {key: tds[0].get(key) for key in self._keys}, None)
        fresh = by_method(self.stack_method, tds) if callable(self.stack_method) else None
        if fresh is None or isinstance(fresh, LazyStackedTensorDict) or isinstance(td, LazyStackedTensorDict):
            return put_rows(td, tds if fresh is None else fresh.unbind(0), mask)
        return self._put(td, {key: fresh.get(key) for key in self._keys}, mask)

    def _pass_through(self, td: TensorDictBase, mask: Tensor | None, count: int) -> TensorDictBase:
        block = self._stream.peek()
        if not block.batch and not td.batch_size:
            return self._filled(td, mask, count)
        if not block.batch or block.size != count or not td.batch_size:
            found = f"a batch of {block.size}" if block.batch else "a single row"
            raise ValueError(
                f"{self._stream.source.name} gives {found}, and {count} rows are reset: use_buffer=False passes them "
                "as they are; use_buffer=True makes batches of any size"
            )
        return self._put(td, {**batch(self._known, [block.parts], None, "as_given"), **self._numbers(count)}, mask)

    def _put(self, td: TensorDictBase, entries: Values, mask: Tensor | None) -> TensorDictBase:
        device = self.device if td.device is None else td.device
        if device is not None:
            entries = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in entries.items()}
        return put_entries(td, entries, mask, self._known)

    def _numbers(self, count: int) -> Values:
        """Return which row of the run each is, and which of its repeats."""
        places = torch.arange(self._stream.dealt, self._stream.dealt + count)
        if self.repeats == 1:
            return {Key.GROUP: places, Key.MEMBER: torch.zeros_like(places)}
        return {Key.GROUP: places // self.repeats, Key.MEMBER: places % self.repeats}

    # What there is to be said of it.

    def transform_observation_spec(self, spec: Composite) -> Composite:
        """Add the keys of the rows, and `group_id` and `repeat_index`."""
        for column in self._known:
            if column.key not in spec or column.key in self._given or (column.text and self.example_data is not None):
                spec[column.key] = column.spec.expand(*spec.shape, *column.spec.shape)
        for key in _OWN:
            spec[key] = Unbounded(spec.shape, spec.device, torch.int64)
        return spec


def _different(keys: Sequence[KeyPath]) -> list[KeyPath]:
    if isinstance(keys, str) or not keys or len(set(keys)) < len(keys):
        raise ValueError(f"data_keys must be a list of different keys: found {keys!r}")
    return list(keys)
