"""Conversations as an environment: messages, text or tokens, which grow by what the policy says and what comes back.

Dimensions: B rows, L tokens of a row, n tokens of an answer; *B is the batch, () or (B,).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ramet.chat import ChatTemplate, Template
from ramet.envs.chat_forms import EXAMPLE, Form, Keys, form_of
from ramet.envs.chat_history import Given, History, Objects, as_messages, items_of, read_history
from ramet.envs.chat_rows import FLAGS, flags_after, is_messages
from ramet.envs.chat_talk import Talks
from ramet.envs.chat_task import EPISODE, OUTCOME, Limits, Players, Step
from ramet.envs.entries import merge, nested
from ramet.envs.env import EnvBase, TransformedEnv
from ramet.ragged import choose
from ramet.ragged.text_entry import entry_of
from ramet.specs import Composite, KeyPath, NonTensor, Unbounded
from ramet.tasks import Task
from ramet.tasks.task import Row
from ramet.transforms.entries import as_batch_size, entry, row_mask, whole
from ramet.transforms.loading import DataLoadingPrimer
from ramet.types import Key, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Mode: TypeAlias = Literal["history", "text", "tokens"]
_MODES = ("history", "text", "tokens")
HISTORY = ("history", "prompt")


class ChatEnv(EnvBase):
    """A conversation with a policy: what is observed grows by each of its turns, and by what a task replies.

    `reset(td)` takes `data_key` ("query"): text, which becomes a message of `user_role`, or a list of messages, which
    is taken as it is; `system_prompt` is put in front, as a message of `system_role`. What the policy sees is under
    `observation_key`, what it says under `action_key`:

    - "history": `("history", "prompt")`, the messages, and `("history", "response")`: text, which becomes a message of
      `policy_role`, or a message, or a list of messages (see `messages_entry`);
    - "text": `("text", "prompt")` and `("text", "response")`, strings; a prompt is what the template writes, an answer
      is without what ends a turn;
    - "tokens": `("tokens", "prompt")` and `("tokens", "response")`, int64 (*B, L) and (*B, n), jagged where there is a
      batch (an answer may be dense); the ids of what the template writes, without padding.

    In place of "response", the whole conversation may be given as "full", which must begin with the prompt. The
    messages are under `("history", "prompt")` in each mode, read by `ramet.rows`; what a model said in tokens is
    decoded, without special tokens, when it is read. A step costs what is new, after any number of turns.

    Without a `task` a conversation never ends, and the next prompt is the last with the answer behind it: no template
    writes anything between. With one (`ramet.tasks.Task`), episodes are those of `ramet.episodes`: a step takes the
    model's turn, runs the tools that it calls or asks the task's `reply`; what comes back is behind the answer, with
    all that the template writes around it. A prompt that is text, with no `system_prompt`, goes on as text where the
    template is one of a chat: messages alone go through it. A row is terminated where the reply is None, and truncated
    after the task's `max_turns`, the last reply being in the messages alone; it stays as it is then, until it is reset.
    A policy may say under "stop_reason" why it stopped, a `StopReason` (or its value, or None) for each row: one that a
    limit cut is truncated, with no reply, for this reason. Where nothing is said the conversation goes on.
    `"reward"`, float32 (*B, 1), is a row's score in the step in which it ended, and 0 before. `"outcome"` holds an
    `Outcome` for each row that ended, None for others: where a function of the task raised, it is an error, and the row
    is truncated, with no score. `"episode"` is where each row stands. The data row of an episode is
    `rows[prompt_index]` where the TensorDict has `prompt_index` (`rows` are the task's training rows by default), else
    the entries of the TensorDict, with the prompt under "prompt". `close` ends what was opened. `ramet.collect` and
    `Actor` play it in mode "tokens" with `observation_key="tokens"` and `action_key="tokens_response"`.

    Tools of all rows run at once, each call for at most `tool_seconds`. So do scores, each for `score_seconds`, sync
    ones in 8 threads; with None those run one after another. Async replies run at once too; sync ones run one after
    another, for a thread each costs more than most of them take, and one that hangs hangs all. Where they block, give
    `reply_seconds`: each `begin` and `reply` has a thread of its own then, and so many seconds. What is late costs its
    own row, whose outcome is timed out.

    A template that writes earlier turns in another way once there are later ones makes other tokens of the row, in
    front of the new ones as well: `ramet.rollouts.collect` refuses such rows, and `ramet.episodes` collects them.

    `template` is by default the tokenizer's chat template, with `template_kwargs` as its variables; `PlainTemplate`
    takes prompts as they are. A turn ends with the tokenizer's eos or one of `stop_ids`, which are no part of the
    message, unless they are text, such as a line break. `batch_size` n is (n,), and no other batch is taken; None or 0
    is (), and takes any number of rows.

    >>> from tensordict import TensorDict
    >>> from ramet.ragged import rows
    >>> env = ChatEnv(system_prompt="Be brief.")
    >>> td = env.reset(TensorDict({"query": ["2+2?", "3+3?"]}, [2]))
    >>> td["history", "response"] = ["4", "7"]
    >>> td = env.step_mdp(env.step(td))
    >>> [message["content"] for message in rows(td, ("history", "prompt"))[1]], td["done"].tolist()
    (['Be brief.', '3+3?', '7'], [[False], [False]])

    With tokens, and a task that asks again until the answer is right:

    >>> from ramet.chat import PlainTemplate
    >>> from ramet.models.tiny import tiny_tokenizer
    >>> tokenizer, sums = tiny_tokenizer(), [{"prompt": "2+2=", "answer": "4"}]
    >>> def reply(episode):
    ...     return None if episode.text == episode.row["answer"] else "?"
    >>> task = Task("sums", sums, sums, lambda sample: float(sample.completion == "4"), reply=reply, max_turns=3)
    >>> env = ChatEnv(input_mode="tokens", tokenizer=tokenizer, template=PlainTemplate(tokenizer), task=task)
    >>> td = env.reset(TensorDict({"prompt_index": torch.tensor([0])}, [1]))
    >>> for answer in ("5", "4"):
    ...     td["tokens", "response"] = torch.tensor([tokenizer(answer, add_special_tokens=False)["input_ids"]])
    ...     stepped = env.step(td)
    ...     td = env.step_mdp(stepped)
    >>> tokenizer.decode(rows(td, ("tokens", "prompt"))[0]), stepped["next", "reward"].tolist(), td["done"].tolist()
    ('<bos>2+2=5?4', [[1.0]], [[True]])
    >>> env.close()
    """

    def __init__(
        self,
        *,
        input_mode: Mode = "history",
        batch_size: int | Sequence[int] | None = None,
        system_prompt: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        system_role: str = "system",
        user_role: str = "user",
        policy_role: str = "assistant",
        data_key: KeyPath | None = None,
        device: torch.device | str | None = None,
        template: Template | None = None,
        task: Task | None = None,
        rows: Sequence[Row] | None = None,
        stop_ids: Sequence[int] = (),
        observation_key: KeyPath | None = None,
        action_key: KeyPath | None = None,
        tool_seconds: float = 30.0,
        score_seconds: float | None = 600.0,
        reply_seconds: float | None = None,
    ) -> None:
        if input_mode not in _MODES:
            raise ValueError(f"input_mode must be one of {list(_MODES)}: found {input_mode!r}")
        if tokenizer is None and input_mode == "tokens":
            raise ValueError('input_mode="tokens" needs a tokenizer, which makes tokens of prompts: found None')
        if tokenizer is None and template is None and input_mode == "text":
            raise ValueError('input_mode="text" needs a tokenizer, whose chat template writes prompts: found None')
        if template is not None and template_kwargs:
            raise ValueError("template_kwargs are variables of the tokenizer's own template: give them to `template`")
        if task is not None and policy_role != "assistant":
            raise ValueError(f"with a task, the policy says what the assistant says: found policy_role={policy_role!r}")
        if input_mode == "history" and observation_key not in (None, HISTORY):
            raise ValueError(f"messages are under {HISTORY}: found observation_key={observation_key!r}")
        size = as_batch_size(batch_size)
        super().__init__(batch_size=size, device=device, batch_locked=bool(size))
        self.input_mode, self.system_prompt, self.task = input_mode, system_prompt, task
        self.tokenizer, self.system_role, self.user_role = tokenizer, system_role, user_role
        self.policy_role = policy_role
        self.data_key: KeyPath = "query" if data_key is None else data_key
        self.observation_key: KeyPath = (input_mode, "prompt") if observation_key is None else observation_key
        self.action_key: KeyPath = (input_mode, "response") if action_key is None else action_key
        keys = Keys(self.observation_key, self.action_key)
        self._form: Form = form_of(input_mode, keys, policy_role, tokenizer)
        self._given = (template, template_kwargs, rows, tuple(stop_ids))
        self._limits = Limits(tool_seconds, score_seconds, reply_seconds)
        self._equip()
        self._make_specs()

    def _equip(self) -> None:
        """Make what is not saved with the environment: what it knows of its template, and what plays its task."""
        self.template, options, rows, stop_ids = self._given
        if self.template is None and self.input_mode != "history" and self.tokenizer is not None:
            self.template = ChatTemplate(self.tokenizer, options)
        self._players: Players | None = None
        if self.task is not None:
            talks = Talks(self.input_mode, self.template, self.tokenizer, stop_ids)
            self._players = Players(self.task, talks, rows, self._limits)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_seed"] = 0 if self._players is None else self._players.seed
        del state["_players"], state["template"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        seed = state.pop("_seed")
        super().__setstate__(state)
        self._equip()
        self._set_seed(seed)

    def _make_specs(self) -> None:
        size, device = self.batch_size, self.device
        observation, action = Composite(shape=size, device=device), Composite(shape=size, device=device)
        observation[HISTORY] = NonTensor(size, device, example_data=[{"role": self.user_role, "content": EXAMPLE}])
        prompt, answer = self._form.specs(size, device)
        if prompt is not None:
            observation[self.observation_key] = prompt
        action[self.action_key] = answer
        if self.action_key in observation:
            raise ValueError(f"each entry needs a key of its own: found {self.action_key!r} twice")
        if self.task is not None:
            observation[EPISODE] = NonTensor(size, device)
            observation[OUTCOME] = NonTensor(size, device)
            reward = {Key.REWARD: Unbounded((*size, 1), device, torch.float32)}
            self.reward_spec = Composite(reward, shape=size, device=device)
        self.observation_spec, self.action_spec = observation, action

    @property
    def prompt_key(self) -> KeyPath | None:
        """Key under which a reset takes prompts."""
        return self.data_key

    @property
    def consumed_keys(self) -> list[KeyPath]:
        """Keys that a step uses up: the answer, or the whole conversation in its place, and why it stopped."""
        full = [] if self._form.keys.full is None else [self._form.keys.full]
        return [*self.action_keys, *full, *([] if self.task is None else [Key.STOP])]

    def close(self) -> None:
        """End what the functions of the task were run with; nothing without a task."""
        if self._players is not None:
            self._players.close()

    def _set_seed(self, seed: int) -> None:
        if self._players is not None:
            self._players.seed = seed

    def _check_batch(self, td: TensorDictBase) -> None:
        super()._check_batch(td)
        if td.batch_dims > 1:
            raise ValueError(f"expected a TensorDict without batch or of batch size (B,): found {tuple(td.batch_size)}")

    # The beginning.

    def _reset(self, td: TensorDictBase) -> TensorDictBase:
        return self._begun(td, row_mask(td, "_reset"))

    def _reset_rows(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        if type(self)._reset is not ChatEnv._reset:  # which leaves rows out as it begins
            return super()._reset_rows(td, mask)
        return merge(td, self._begun(td, mask))

    def _begun(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        """Return the observations after a reset of the rows that `mask` names; the others are as they were."""
        count, batch = td.batch_size.numel(), bool(td.batch_dims)
        flags = [True] * count if mask is None else mask.reshape(-1).tolist()
        fresh = [row for row, flag in enumerate(flags) if flag]
        entries: dict[KeyPath, Any] = {}
        if self._players is None:
            queries = self._queries(td)
            prompts = self._prompts({row: queries[row] for row in fresh})
            opened = self._opened(prompts)
        else:
            rows = self._players.data_rows(td, self.data_key, fresh)
            prompts = self._prompts({row: data["prompt"] for row, data in rows.items()})
            stands, opened = self._players.begin(td, rows, prompts)
            entries[EPISODE] = entry_of(Objects([stands.get(row) for row in range(count)]), batch)
            entries[OUTCOME] = entry_of(Objects([None] * count), batch)
        entries[self.observation_key] = self._form.begun([opened.get(row) for row in range(count)], td)
        entries[HISTORY] = History.of([prompts.get(row, []) for row in range(count)]).entry(batch)
        entries |= {flag: torch.zeros((*td.batch_size, 1), dtype=torch.bool, device=td.device) for flag in FLAGS}
        if mask is not None:
            before = {key: whole(td, key) for key in entries}
            entries = {
                key: value if before[key] is None else choose(mask, value, before[key])
                for key, value in entries.items()
            }
        return nested(entries, td)

    def _queries(self, td: TensorDictBase) -> list[Any]:
        if entry(td, self.data_key) is None:
            raise KeyError(
                f"reset needs {self.data_key!r}, text or messages for each row: pass it in the TensorDict, or make the "
                f"environment by from_dataloader (data_key names another entry); there are "
                f"{sorted(map(str, td.keys()))}"
            )
        return items_of(td, self.data_key)

    def _prompts(self, queries: Mapping[int, Any]) -> dict[int, list[Message]]:
        front: list[Message] = []
        if self.system_prompt is not None:
            front = [{"role": self.system_role, "content": self.system_prompt}]
        return {row: [*front, *as_messages(item, self.user_role, self.data_key, row)] for row, item in queries.items()}

    def _opened(self, prompts: Mapping[int, list[Message]]) -> dict[int, Any]:
        """Return the text or the ids of prompts, of which those that are equal are written once."""
        template, known, opened = self.template, dict[str, Any](), dict[int, Any]()
        if self.input_mode == "history" or template is None:
            return opened
        for row, messages in prompts.items():
            key = repr(messages)
            if key not in known:
                text = template.render(messages)
                known[key] = text if self.input_mode == "text" else template.encode(text, opening=True)
            opened[row] = known[key]
        return opened

    # A turn.

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return self._stepped(td, row_mask(td, "_step"))

    def _step_rows(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        if type(self)._step is not ChatEnv._step:  # which leaves rows out as it steps
            return super()._step_rows(td, mask)
        return self._stepped(td, mask)

    def _stepped(self, td: TensorDictBase, mask: Tensor | None) -> TensorDictBase:
        history, batch = read_history(td, HISTORY), bool(td.batch_dims)
        answer = self._form.answer(td, history)
        if self._players is not None:
            return self._played(td, self._players.step(td, mask, self._form.words(answer)), history)
        longer = history.append(answer.part, None if mask is None else mask.reshape(-1).tolist())
        entries: dict[KeyPath, Any] = {self.observation_key: self._form.appended(td, answer, mask)}
        entries[HISTORY] = longer.entry(batch)
        return nested(entries | flags_after(td, mask, {}), td)

    def _played(self, td: TensorDictBase, step: Step, history: History) -> TensorDictBase:
        """Return what came of a turn of a task; rows that did not take it stay as they are."""
        batch = bool(td.batch_dims)
        taken = torch.tensor(step.taken, device=td.device).view(td.batch_size)
        ends = {name: torch.tensor(flags, device=td.device) for name, flags in step.flags.items()}
        rewards = torch.tensor(step.rewards, dtype=torch.float32, device=td.device)
        entries: dict[KeyPath, Any] = {
            self.observation_key: self._form.written(td, step.turns),
            EPISODE: entry_of(Objects(step.stands), batch),
            OUTCOME: entry_of(Objects(step.outcomes), batch),
            Key.REWARD: rewards.view(*td.batch_size, 1),
        }
        entries[HISTORY] = history.append(Given(step.messages), step.taken).entry(batch)
        return nested(entries | flags_after(td, taken, ends), td)

    # Prompts out of a loader, or of a task.

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Any,
        *,
        repeats: int | None = None,
        device: torch.device | str | None = None,
        group_repeats: bool = False,
        batch_size: int | Sequence[int] | None = None,
        primers: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        input_mode: Mode = "history",
        data_key: KeyPath | None = None,
        system_prompt: str | None = None,
        template: Template | None = None,
        task: Task | None = None,
        stop_ids: Sequence[int] = (),
        observation_key: KeyPath | None = None,
        action_key: KeyPath | None = None,
        tool_seconds: float = 30.0,
        score_seconds: float | None = 600.0,
        reply_seconds: float | None = None,
    ) -> TransformedEnv:
        """Make an environment of this class whose prompts come from a loader, by a `DataLoadingPrimer`.

        The loader gives strings, or rows with text or messages under `data_key`; a list of lists of messages is taken
        as well. Its batch size is the primer's: `batch_size`, or that of the loader, times `repeats` with
        `group_repeats`. With a `task`, the rows of the loader are those of its episodes.

        >>> from ramet.ragged import rows
        >>> env = ChatEnv.from_dataloader(["2+2?", "3+3?"], batch_size=2)
        >>> rows(env.reset(), ("history", "prompt"))[1]
        [{'role': 'user', 'content': '3+3?'}]
        """
        if data_key is None:
            data_key = "query"
        if isinstance(dataloader, Sequence) and dataloader and all(map(is_messages, dataloader)):
            dataloader = [{data_key: messages} for messages in dataloader]
        primer = DataLoadingPrimer(
            dataloader,
            primers=primers,
            batch_size=batch_size,
            repeats=repeats,
            group_repeats=group_repeats and repeats is not None,
            device=device,
        )
        env = cls(
            input_mode=input_mode,
            batch_size=primer.batch_size,
            system_prompt=system_prompt,
            tokenizer=tokenizer,
            template_kwargs=template_kwargs,
            data_key=data_key,
            device=device,
            template=template,
            task=task,
            stop_ids=stop_ids,
            observation_key=observation_key,
            action_key=action_key,
            tool_seconds=tool_seconds,
            score_seconds=score_seconds,
            reply_seconds=reply_seconds,
        )
        return env.append_transform(primer)
