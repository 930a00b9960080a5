"""The settings of commands that play a task: those that they read, and no others."""

from __future__ import annotations

import pytest

from ramet.cli.asked import read_settings, rows_of, task_of
from ramet.errors import ConfigError
from ramet.tasks import Task


def test_options_reach_the_task() -> None:
    sets = ["task.options.digits=1", "task.options.operations=-", "task.options.held_out_size=5"]
    task = task_of(read_settings("arithmetic", sets, seed=3))
    assert len(task.held_out) == 5
    assert all("-" in row["prompt"] for row in task.train)
    other = task_of(read_settings("arithmetic", sets, seed=4))
    assert other.held_out == task.held_out
    assert other.train != task.train


def test_a_key_that_is_not_read_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"loss\.kind is not read here: found the override .*\n.*known: task\."):
        read_settings("arithmetic", ["loss.kind=clipped"], seed=0)
    with pytest.raises(ConfigError, match=r'did you mean "task\.options"'):
        read_settings("arithmetic", ["task.option.digits=1"], seed=0)
    with pytest.raises(ConfigError, match=r"task\.name is not read here"):
        read_settings("arithmetic", ["task.name=sorting"], seed=0)
    with pytest.raises(ConfigError, match=r"model\.device is not read here"):
        read_settings("arithmetic", ["model.device=cpu"], seed=0, keys=("model.dtype",))


def test_a_value_that_can_not_be_is_refused_where_it_comes_from() -> None:
    with pytest.raises(ConfigError, match=r'rollout\.top_p: .* in the override "rollout\.top_p=2"'):
        read_settings("arithmetic", ["rollout.top_p=2"], seed=0, keys=("rollout.top_p",))


def test_given_values_are_those_of_the_command() -> None:
    given = {"rollout": {"max_new_tokens": 7}}
    config = read_settings("arithmetic", ["rollout.top_k=3"], seed=0, keys=("rollout.top_k",), given=given)
    assert (config.rollout.max_new_tokens, config.rollout.top_k) == (7, 3)
    assert given == {"rollout": {"max_new_tokens": 7}}


def test_a_task_without_such_rows_says_which_there_are() -> None:
    task = Task("t", [{"prompt": "?"}], [], lambda sample: 0.0)
    assert rows_of(task, "train") == [{"prompt": "?"}]
    with pytest.raises(ConfigError, match=r"the task t has no held-out rows\n.*--split train"):
        rows_of(task, "held-out")
