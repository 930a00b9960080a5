"""Every key is checked: unknown ones, wrong types, values out of range and contradictions are told apart."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ramet.config import KLConfig, OptimizerConfig, RolloutConfig, Section, TrainConfig, checked, dump, load, parse
from ramet.config import settings as all_settings
from ramet.errors import ConfigError

SMALL = """
steps = 3
[model]
name = "tiny-llama"
[task]
name = "arithmetic"
[rollout]
max_new_tokens = 8
[optimizer]
learning_rate = 1e-4
"""

PULL = "kl.coefficient=0.1"
SCALARS = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


def test_what_is_left_out_has_its_default() -> None:
    config = parse(SMALL)
    assert (config.name, config.seed, config.threads, config.warm_start) == ("run", 0, None, None)
    assert (config.kl.coefficient, config.kl.estimator, config.kl.place, config.kl.unbiased) == (
        0.0,
        "k3",
        "loss",
        False,
    )
    assert (config.rollout.too_long, config.rollout.truncated) == ("refuse", "score")
    assert config.folder == Path("runs/run")


def test_model_and_task_may_be_absent_and_are_then_none() -> None:
    config = parse("steps = 1", ["rollout.max_new_tokens=1", "optimizer.learning_rate=1"])
    assert config.model is None
    assert config.task is None


def test_a_file_is_read_and_overrides_win_over_it_the_later_ones_over_the_earlier(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    assert load(path).steps == 3
    assert load(path, ["steps=5", "steps=7"]).steps == 7


def test_values_of_overrides_are_toml_or_bare_strings() -> None:
    config = parse(
        SMALL,
        [
            "optimizer.learning_rate=3e-5",
            "optimizer.betas=[0.8, 0.9]",
            "task.name=reasoning-gym:leg_counting",
            "task.options.digits=[1, 2]",
            "rollout.stop=['\\n']",
            "control.shuffle_rewards=true",
            "kl.coefficient=0.1",
            "kl.estimator='k1'",
            " kl.place = reward ",
        ],
    )
    assert config.optimizer.learning_rate == 3e-5
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.task is not None
    assert (config.task.name, config.task.options) == ("reasoning-gym:leg_counting", {"digits": [1, 2]})
    assert config.rollout.stop == ["\\n"]  # single quotes are TOML's literal strings
    assert config.control.shuffle_rewards is True
    assert (config.kl.estimator, config.kl.place) == ("k1", "reward")


def test_none_empties_a_key_or_a_section_that_may_be_absent() -> None:
    text = SMALL + "[warm_start]\nuntil = 0.5\n[loss]\nimportance_cap = 2.0\n"
    assert parse(text).loss.importance_cap == 2.0
    emptied = parse(text, ["loss.importance_cap=none", "warm_start=none"])
    assert emptied.loss.importance_cap is None
    assert emptied.warm_start is None


def test_a_whole_section_is_replaced_by_an_inline_table() -> None:
    config = parse(SMALL + "[task.options]\ndigits = 3\n", ['task={name="other"}'])
    assert config.task is not None
    assert (config.task.name, config.task.options) == ("other", {})


def test_a_line_break_in_an_override_sets_no_second_key() -> None:
    config = parse(SMALL, ["task.name=1\nseed = 9"])
    assert config.task is not None
    assert (config.task.name, config.seed) == ("1\nseed = 9", 0)


def test_an_integer_is_a_float_where_one_is_expected() -> None:
    assert parse(SMALL, ["kl.coefficient=1"]).kl.coefficient == 1.0


@pytest.mark.parametrize(
    ("override", "key", "meant"),
    [
        ("kl.palce=reward", "kl.palce", "did you mean kl.place?"),
        ("optimizr.learning_rate=1", "optimizr", "did you mean optimizer?"),
        ("warm_start.untl=1", "warm_start.untl", "did you mean warm_start.until?"),
        ("rollout.learning_rate=1", "rollout.learning_rate", "did you mean warm_start.learning_rate?"),
        ("optimzer=none", "optimzer", "did you mean optimizer?"),
        ("evaluation.temperatures=1", "evaluation.temperatures", "did you mean rollout.temperature?"),
        ("loss.qqqq=1", "loss.qqqq", "known in [loss]: kind, reduction, clip_low, clip_high, importance_cap"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(override: str, key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(SMALL, [override])
    assert caught.value.message.startswith(f'unknown key {key} in the override "{override}"')
    assert meant in str(caught.value.hint)
    assert "known " in str(caught.value.hint)


def test_an_unknown_key_in_the_file_names_the_file_and_comes_before_what_it_leaves_missing(tmp_path: Path) -> None:
    path = tmp_path / "typo.toml"
    path.write_text(SMALL.replace("learning_rate", "learnin_rate"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.message == (
        f"unknown key optimizer.learnin_rate in {path} (also wrong: optimizer.learning_rate)"
    )
    assert "did you mean optimizer.learning_rate?" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=-1", "steps: expected a number greater than or equal to 0, found -1 (an integer)"),
        ("steps=ten", 'steps: expected an integer, found "ten" (a string)'),
        ("steps=true", "steps: expected an integer, found true (a boolean)"),
        ("steps=1.0", "steps: expected an integer, found 1.0 (a float)"),
        ("kl.coefficient=nan", "kl.coefficient: expected a finite number"),
        ("kl.coefficient=none", "kl.coefficient: expected a number, found none"),
        ("rollout.temperature=0", "rollout.temperature: expected a number greater than 0"),
        ("rollout.max_failed_fraction=1.5", "rollout.max_failed_fraction: expected a number less than or equal to 1"),
        ("rollout.top_k=0", "rollout.top_k: expected a number greater than or equal to 1, found 0"),
        ("rollout.top_p=0", "rollout.top_p: expected a number greater than 0"),
        ("rollout.top_p=1.1", "rollout.top_p: expected a number less than or equal to 1"),
        ("rollout.min_p=1.0", "rollout.min_p: expected a number less than 1"),
        ("rollout.min_p=-0.1", "rollout.min_p: expected a number greater than or equal to 0"),
        ("rollout.stop=x", 'rollout.stop: expected a list, found "x"'),
        ("rollout.stop=[1]", "rollout.stop.0: expected a string, found 1"),
        ("advantage.kind=leave_one_out_std", "expected 'group_mean', 'group_mean_std' or 'leave_one_out'"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas: expected two numbers from 0 up to but without 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas: expected more items, found [0.9]"),
        ("control.shuffle_rewards=True", 'control.shuffle_rewards: expected a boolean, found "True"'),
        ("model.options.layers=[1]", "model.options.layers: expected an integer or a number or a string, found [1]"),
        ("task.options.when=2024-01-01", "task.options.when: expected a boolean or an integer"),
        ("model.device=gpu", "model.device: expected pattern"),
        ("task=1", "task: expected a section (a TOML table), found 1"),
        ("seed.x=1", 'seed: expected an integer, found {"x": 1} (a table)'),
        ("name=a/b", "name: expected letters, digits"),
        ("name=..", "name: expected letters, digits"),
        ("task.name=\udc80", "task.name: expected a string, unable to parse"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_what_was_expected_and_what_was_found(
    override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(SMALL, [override], where="small.toml")
    assert message in caught.value.message
    assert f'the override "{override}"' in caught.value.message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.dtype=bfloat16", "model.autocast=bfloat16"], "model.autocast"),
        (["model.name=smollm2", "model.options.layers=2"], "model.options"),
        (["model.revision=main"], "model.revision"),
        (["model.attention=eager"], "model.attention"),
        (["task.name=file", "task.prompts=p.jsonl"], "task.reward"),
        (["task.name=file", "task.reward=m:f"], "task.prompts"),
        (["task.held_out=h.jsonl"], "task.held_out"),
        (["rollout.prompts_per_step=1", "rollout.group_size=4", "optimizer.updates_per_step=5"], "the 4 rollouts"),
        ([PULL, "kl.unbiased=true", "kl.estimator=k2"], "kl.unbiased needs kl.estimator"),
        ([PULL, "kl.unbiased=true", "kl.place=reward"], "kl.unbiased is about the penalty in the loss"),
        ([PULL, "kl.estimator=k2", "kl.place=reward"], "the reward always uses"),
        ([PULL, "kl.estimator=k1"], "no gradient in expectation"),
        ([PULL, "kl.estimator=k1", "kl.place=both"], "no gradient in expectation"),
        (["kl.estimator=k1"], "kl.estimator is about a penalty, and kl.coefficient = 0 charges none"),
        (["kl.place=both"], "kl.place is about a penalty, and kl.coefficient = 0 charges none"),
        (["kl.unbiased=true"], "kl.unbiased is about a penalty, and kl.coefficient = 0 charges none"),
        (["loss.kind=policy_gradient", "loss.clip_low=0.1"], "loss.clip_low is read by"),
        (["loss.kind=policy_gradient", "loss.clip_high=0.3"], "loss.clip_high is read by"),
        (["loss.kind=policy_gradient", "optimizer.updates_per_step=2"], "found 2 (optimizer.updates_per_step x"),
        (["loss.kind=policy_gradient", "optimizer.epochs_per_step=3", "loss.importance_cap=2"], "found 3 ("),
        (["optimizer.warmup_steps=4"], "optimizer.warmup_steps = 4 is more than steps = 3"),
        (["rollout.top_k=1"], "rollout.top_k = 1 teaches nothing"),
        ([PULL, "kl.unbiased=true", "rollout.top_p=0.9"], "kl.unbiased is exact over whole distributions only"),
        (["rollout.top_k=1", "rollout.top_p=0.9"], "rollout.top_p is void beside rollout.top_k = 1"),
        (["rollout.top_k=1", "rollout.min_p=0.1"], "rollout.min_p is void beside rollout.top_k = 1"),
        (["rollout.top_k=1", "rollout.temperature=2", "steps=0"], "rollout.temperature is void beside"),
        (["rollout.group_size=1"], "rollout.group_size = 1 teaches nothing"),
        (["rollout.group_size=1", PULL, "kl.place=reward"], "rollout.group_size = 1 teaches nothing"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=r"small\.toml") as caught:
        parse(SMALL, overrides, where="small.toml")
    assert message in caught.value.message
    assert caught.value.hint


def test_settings_that_only_look_odd_are_accepted() -> None:
    assert parse(SMALL, ["steps=0", "rollout.group_size=1", "optimizer.warmup_steps=5"]).steps == 0
    assert parse(SMALL, ["steps=0", "rollout.top_k=1"]).rollout.top_k == 1
    assert parse(SMALL, ["rollout.top_k=2", "rollout.top_p=0.5", "rollout.min_p=0.1"]).rollout.top_p == 0.5
    assert parse(SMALL, ["optimizer.warmup_steps=3"]).optimizer.warmup_steps == 3
    assert parse(SMALL, ["rollout.group_size=1", PULL]).rollout.group_size == 1
    assert parse(SMALL, [PULL, "kl.estimator=k1", "kl.unbiased=true"]).kl.estimator == "k1"
    assert parse(SMALL, [PULL, "kl.estimator=k1", "kl.place=reward"]).kl.estimator == "k1"
    assert parse(SMALL, ["loss.kind=policy_gradient", "loss.importance_cap=2"]).loss.kind == "policy_gradient"


def test_a_default_that_is_written_down_is_no_contradiction() -> None:
    """Whatever is accepted is accepted again after it was written with all its defaults."""
    defaults = ["kl.coefficient=0", "kl.estimator=k3", "kl.place=loss", "kl.unbiased=false", "loss.clip_low=0.2"]
    config = parse(SMALL, [*defaults, "loss.kind=policy_gradient"])
    assert parse(dump(config)) == config == parse(SMALL, ["loss.kind=policy_gradient"])


@pytest.mark.parametrize("key", ["model.dtype", "model.autocast"])
def test_float16_is_refused_and_bfloat16_is_not(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: expected .*'bfloat16', found \"float16\"") as caught:
        parse(SMALL, [f"{key}=float16"])
    assert "float32" in str(caught.value.hint)
    assert key.rpartition(".")[2] in parse(SMALL, [f"{key}=bfloat16"]).model.model_fields_set  # type: ignore[union-attr]


def test_the_autocast_is_given_as_torchs_dtype_and_none_where_there_is_none() -> None:
    assert parse(SMALL, ["model.autocast=bfloat16"]).autocast_dtype is torch.bfloat16
    assert parse(SMALL).autocast_dtype is None
    assert parse(SMALL, ["model=none"]).autocast_dtype is None


def test_nested_mappings_are_checked_like_text_and_errors_name_where_they_are_from() -> None:
    config = parse(SMALL)
    assert checked(config.model_dump(exclude_none=True), where="here") == config
    with pytest.raises(ConfigError, match=r"steps: expected a number .*found -1 \(an integer\) in here"):
        checked({**config.model_dump(exclude_none=True), "steps": -1}, where="here")
    with pytest.raises(ConfigError, match="never be reached, in here"):
        checked({**config.model_dump(), "optimizer": {"learning_rate": 1.0, "warmup_steps": 4}}, where="here")


ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("path", sorted(ROOT.glob("src/ramet/recipes/*.toml")), ids=lambda path: path.stem)
def test_the_recipes_load_and_load_again_as_they_are_written(path: Path) -> None:
    config = load(path)
    assert parse(dump(config)) == config


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=1", ".a=1", ""])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        parse(SMALL, [override])


def test_an_override_that_leads_through_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="steps is a value"):
        parse(SMALL, ["steps.x=1"])


def test_missing_keys_and_files_and_broken_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^rollout is missing in the text \(also wrong: optimizer\)"):
        parse("steps = 1")
    with pytest.raises(ConfigError, match=r"model\.name is missing"):
        parse(SMALL, ["model={}"])
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=r"small\.toml is no valid TOML"):
        parse("steps = ", where="small.toml")
    (tmp_path / "latin.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match=r"latin\.toml"):
        load(tmp_path / "latin.toml")


def test_a_config_is_frozen_and_takes_no_unknown_argument() -> None:
    config = parse(SMALL)
    with pytest.raises(ValidationError):
        config.kl.coefficient = 1.0
    with pytest.raises(ValidationError):
        TrainConfig.model_validate({**config.model_dump(), "extra": 1})


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda: RolloutConfig(group_sice=3), "unknown key rollout.group_sice", "mean rollout.group_size?"),
        (lambda: RolloutConfig(), "rollout.max_new_tokens is missing in RolloutConfig(...)", "Limit of a completion"),
        (lambda: RolloutConfig(max_new_tokens=0), "rollout.max_new_tokens: expected a number greater", "Limit"),
        (lambda: TrainConfig(steps=1, nam="x"), "unknown key nam in TrainConfig(...)", "did you mean name?"),
        (lambda: KLConfig(placed="loss"), "unknown key kl.placed in KLConfig(...)", "did you mean kl.place?"),
    ],
)
def test_a_section_that_is_called_with_a_wrong_key_names_the_nearest(make: Any, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert message in raised.value.message
    assert hint in str(raised.value.hint)


def test_sections_that_contradict_each_other_are_refused_in_python_as_in_a_file() -> None:
    rest = {"rollout": RolloutConfig(max_new_tokens=1), "optimizer": OptimizerConfig(learning_rate=1.0)}
    with pytest.raises(ConfigError, match=r"kl\.coefficient = 0 charges none, in TrainConfig"):
        TrainConfig(steps=1, kl=KLConfig(estimator="k1"), **rest)


def test_every_setting_says_what_it_is_and_each_that_may_be_none_is_none_when_absent() -> None:
    found = all_settings()
    assert {"steps", "warm_start.until", "kl.place", "task.options"} <= found.keys()
    for key, field in found.items():
        assert field.description, key
        assert field.description.endswith("."), key
        if type(None) in getattr(field.annotation, "__args__", ()):
            assert field.default is None, key  # TOML has no null: absent is the only way to write None
    assert all(issubclass(type(value), Section) for value in (parse(SMALL).kl, parse(SMALL).loss))


@settings(deadline=None, max_examples=60)
@given(
    options=st.dictionaries(st.text(), SCALARS | st.lists(SCALARS)),
    stop=st.lists(st.text()),
    rate=st.floats(min_value=1e-300, max_value=1e300),
    until=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_what_is_dumped_loads_back_equal(
    options: dict[str, object], stop: list[str], rate: float, until: float | None
) -> None:
    data = tomllib.loads(SMALL)
    data["task"]["options"] = options
    data["rollout"]["stop"] = stop
    data["optimizer"]["learning_rate"] = rate
    data["warm_start"] = {"until": until}
    config = TrainConfig.model_validate(data)
    again = parse(dump(config))
    assert again == config
    # Python holds True == 1 == 1.0; the types have to come back as well.
    assert again.model_dump_json() == config.model_dump_json()
