"""Count the steps of an episode, and cut it at a limit."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from ramet.specs import Composite, Unbounded
from ramet.transforms.transform import Transform


class StepCounter(Transform):
    """Write `step_count`, int64 (*B, 1); at `max_steps` an episode is truncated, which is never an end of its own.

    A truncated row is done; `terminated` stays as the environment said it. The cut is in `truncated`, and in
    `truncated_key` where that is another.

    >>> from tensordict import TensorDict
    >>> from ramet.envs.llm import LLMEnv
    >>> env = LLMEnv(from_text=False, eos_token_id=9).append_transform(StepCounter(max_steps=2))
    >>> td = env.reset(TensorDict({"tokens": torch.tensor([[1], [2]])}, [2]))
    >>> td["step_count"].tolist()
    [[0], [0]]
    >>> td = env.step(td.set("tokens_response", torch.tensor([[5], [9]])))
    >>> td["next", "step_count"].tolist(), td["next", "done"].tolist()
    ([[1], [1]], [[False], [True]])
    >>> rollout = env.rollout(9, lambda td: td.set("tokens_response", torch.tensor([[5], [6]])), tensordict=td)
    >>> rollout.batch_size, rollout["next", "truncated"][:, -1].tolist(), rollout["next", "terminated"][:, -1].tolist()
    (torch.Size([2, 2]), [[True], [True]], [[False], [False]])
    """

    def __init__(
        self, max_steps: int | None = None, truncated_key: str = "truncated", step_count_key: str = "step_count"
    ) -> None:
        super().__init__()
        if max_steps is not None and (type(max_steps) is not int or max_steps < 1):
            raise ValueError(f"max_steps must be a whole number, at least 1: found {max_steps!r}")
        self.max_steps, self.truncated_key, self.step_count_key = max_steps, truncated_key, step_count_key

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        done = td_reset.get("done")
        td_reset.set(self.step_count_key, torch.zeros_like(done, dtype=torch.int64))
        if self.max_steps is not None and self.truncated_key != "truncated":
            td_reset.set(self.truncated_key, torch.zeros_like(done))
        return td_reset

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        before = td.get(self.step_count_key, None)
        done = next_td.get("done")
        count = torch.ones_like(done, dtype=torch.int64) if before is None else before + 1
        next_td.set(self.step_count_key, count)
        if self.max_steps is not None:
            cut = count >= self.max_steps
            for key in {"truncated", self.truncated_key}:
                truncated = next_td.get(key, None)
                next_td.set(key, cut if truncated is None else truncated | cut)
            next_td.set("done", done | cut)
        return next_td

    def transform_observation_spec(self, spec: Composite) -> Composite:
        """Add the count."""
        spec[self.step_count_key] = Unbounded((*spec.shape, 1), spec.device, torch.int64)
        return spec

    def transform_done_spec(self, spec: Composite) -> Composite:
        """Add the flag, where it has a name of its own."""
        if self.max_steps is not None and self.truncated_key not in spec:
            spec[self.truncated_key] = spec["done"]
        return spec
