"""The command `ramet`. Nothing heavy is imported before a command needs it, so that `ramet --help` answers at once.

What a command is asked for goes to stdout, all else to stderr. Exit codes: 0 done, 1 failed, 2 a setting, a file or the
command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import click

from ramet import __version__
from ramet.errors import ConfigError, DataError, RametError, RunExists, nearest

Command = TypeVar("Command", bound=Callable[..., Any])


class ErrorsAsText(click.Group):
    """A group that shows ramet's own errors as two lines in place of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn a `RametError` into a message and an exit code."""
        try:
            return super().invoke(ctx)
        except RametError as error:
            if ctx.meta.get("ramet.traceback"):
                raise
            _show_error(error)
            ctx.exit(2 if isinstance(error, (ConfigError, DataError, RunExists)) else 1)
        except OSError as error:
            # A pipe whose reader has gone is click's to end.
            if error.errno == errno.EPIPE or ctx.meta.get("ramet.traceback"):
                raise
            _show_error(_of_the_system(error, ctx.invoked_subcommand))
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


def _show_error(error: RametError) -> None:
    """Show what is wrong on one line, and what to do on the next: what libraries say may have several."""
    from ramet.viewer.text import visible

    for name, text in (("error", error.message), ("hint", error.hint)):
        if text is not None:
            click.echo(f"{name}: {visible(' '.join(text.split()))}", err=True)


def _of_the_system(error: OSError, command: str | None) -> RametError:
    """Return an error of the operating system as one of ramet's: a full disk, a folder that may not be written to."""
    path = "" if error.filename is None else f"{error.filename}: "
    onward = ", and a run goes on with --resume" if command == "train" else ""
    hints = {
        errno.ENOSPC: f"make room; what was written before is whole{onward}",
        errno.EACCES: "change its permissions, or name another place",
        errno.EPERM: "change its permissions, or name another place",
        errno.EROFS: "nothing can be written there: name another place",
    }
    hint = hints.get(error.errno or 0, "--traceback shows where it was raised")
    return RametError(f"{path}{error.strerror or error}", hint=hint)


def _version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked or ctx.resilient_parsing:
        return
    click.echo(f"ramet {__version__}")
    ctx.exit()


def _remember_traceback(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        ctx.meta["ramet.traceback"] = True  # shared by the contexts of the group and of its commands


def with_traceback(command: Command) -> Command:
    """Add `--traceback`, which shows where an error was raised."""
    help_text = "Show where an error was raised."
    option = click.option(
        "--traceback", is_flag=True, expose_value=False, is_eager=True, callback=_remember_traceback, help=help_text
    )
    return option(command)


@click.group(cls=ErrorsAsText, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version and exit."
)
@with_traceback
def main() -> None:
    """Train language models with reinforcement learning."""


@main.command()
@click.argument("recipe", default="sorting")
@click.option("overrides", "--set", multiple=True, metavar="KEY=VALUE", help="Set a key, e.g. kl.coefficient=0.01.")
@click.option("--name", help="Name of the run, and of its folder.")
@click.option("--runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint of the run.")
@with_traceback
def train(recipe: str, overrides: tuple[str, ...], name: str | None, runs: str | None, resume: bool) -> None:
    """Train a model, and show what it learned.

    RECIPE is the name of a recipe that comes with ramet (see `ramet recipes`), a TOML file, or the folder of a run.
    """
    path = find_recipe(recipe)
    named = {"name": name, "runs": runs}
    if path.name == "config.toml" and Path(recipe).is_dir():
        folder = path.parent.resolve()  # where the run is now, should it have been moved
        named = {"name": name or folder.name, "runs": runs or str(folder.parent)}
    settings = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]

    from ramet import config
    from ramet.cli.train import run

    click.get_current_context().exit(run(config.load(path, [*overrides, *settings]), resume))


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@with_traceback
def report(run: Path) -> None:
    """Write the page about a run, and print its path.

    RUN is the folder of a run.
    """
    from ramet.metrics import is_torn
    from ramet.viewer.report import write_report

    written = write_report(run)
    for path in (run / "metrics.jsonl", run / "rollouts.jsonl"):
        if path.is_file() and is_torn(path):
            click.echo(f"note: the last line of {path} was cut short, and is left out", err=True)
    click.echo(written)


@main.command()
def recipes() -> None:
    """List the recipes that come with ramet."""
    for name, path in shipped_recipes().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        about = first.removeprefix("#").strip() if first.startswith("#") else ""
        click.echo(f"{name:<16} {about}".rstrip())


@main.command("settings")
@with_traceback
def show_settings() -> None:
    """List every key that a recipe may set, with its default and what it means."""
    from pydantic_core import PydanticUndefined

    from ramet.config import settings

    for key, field in settings().items():
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = "required" if default is PydanticUndefined else "absent" if default is None else json.dumps(default)
        click.echo(f"{key} ({shown})\n    {field.description}")


def with_task(command: Command) -> Command:
    """Add what says which task, and what of it: `--set`, `--seed`."""
    for add in (
        click.option("--seed", type=click.IntRange(min=0), default=0, help="All randomness is a function of it."),
        click.option(
            "overrides", "--set", multiple=True, metavar="KEY=VALUE", help="Set a key, e.g. task.options.digits=3."
        ),
        click.argument("task"),
    ):
        command = add(command)
    return command


with_split = click.option(
    "--split", type=click.Choice(["held-out", "train"]), default="held-out", help="Which rows of the task."
)


@main.command()
@with_task
@with_split
@click.option("--row", type=click.IntRange(min=0), default=0, help="Which of them, counted from 0.")
@with_traceback
def play(task: str, overrides: tuple[str, ...], seed: int, split: Any, row: int) -> None:
    """Play a task in the terminal, in the place of a model.

    TASK is the name of a task, as in `task.name` of a recipe.
    """
    from ramet.cli.play import run

    click.get_current_context().exit(run(task, overrides, seed=seed, split=split, number=row))


@main.command()
@with_task
@click.option("--episodes", type=click.IntRange(min=1), default=32, show_default=True, help="Rows that are played.")
@click.option("--full", type=float, default=1.0, show_default=True, help="What the reference must earn.")
@click.option("--episode-seconds", type=float, default=60.0, show_default=True, help="What an episode may take.")
@click.option("--tool-seconds", type=float, default=30.0, show_default=True, help="What a call of a tool may take.")
@click.option("--score-seconds", type=float, default=60.0, show_default=True, help="What the score may take.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@with_traceback
def check(
    task: str,
    overrides: tuple[str, ...],
    seed: int,
    episodes: int,
    full: float,
    episode_seconds: float,
    tool_seconds: float,
    score_seconds: float,
    as_json: bool,
) -> None:
    """Prove a task without a model: its reference earns all, wrong answers do not, episodes repeat.

    TASK is the name of a task, as in `task.name` of a recipe. Exit code: 0 where every check passed, else 1.
    """
    from ramet.checking import Limits
    from ramet.cli.check import run

    try:
        limits = Limits(episode_seconds, tool_seconds, score_seconds)
    except ValueError as error:
        raise ConfigError(
            str(error), hint="give more to --episode-seconds, --tool-seconds or --score-seconds"
        ) from error
    done = run(task, overrides, seed=seed, episodes=episodes, full=full, limits=limits, as_json=as_json)
    click.get_current_context().exit(done)


def _whole_numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        numbers = sorted({int(part) for part in value.split(",")})
    except ValueError as error:
        raise click.BadParameter(
            f"expected whole numbers with commas between them, as 1,4,16: found {value}"
        ) from error
    return tuple(numbers)


@main.command("eval")
@with_task
@click.option(
    "--model", metavar="NAME|FOLDER", help="A transformers model, or the folder of a run: its newest weights."
)
@click.option("--server", metavar="URL", help="An OpenAI-compatible server; --model is what it calls the model.")
@click.option(
    "--policy", type=click.Choice(["reference", "person"]), help="Without a model: the task's reference, or you."
)
@click.option(
    "--tokenizer", metavar="NAME|FOLDER", help="Of the served model: ids instead of text, where the server can."
)
@click.option("--api-key-from", metavar="VARIABLE", help="Environment variable that holds the server's key.")
@click.option("--problems", type=click.IntRange(min=1), default=100, show_default=True, help="Rows that are played.")
@click.option("--samples", type=click.IntRange(min=1), default=1, show_default=True, help="Episodes of each row.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Of a model; 0 is greedy, the default is 1.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Of a turn of a model; the default is 512.")
@click.option("--k", "ks", metavar="K,...", callback=_whole_numbers, help="The k of pass@k; default: 1 and --samples.")
@click.option("--pass-at", type=float, default=1.0, show_default=True, help="The score from which a rollout passes.")
@click.option("--by", metavar="COLUMN", help="Column to tell the rows apart by; default: their difficulty, if any.")
@with_split
@click.option("--name", help="Name of the folder that the rollouts are kept in.")
@click.option("--runs", metavar="DIR", default="runs", show_default=True, help="Folder that holds it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@with_traceback
def evaluate(
    task: str,
    overrides: tuple[str, ...],
    seed: int,
    model: str | None,
    server: str | None,
    policy: Any,
    tokenizer: str | None,
    api_key_from: str | None,
    problems: int,
    samples: int,
    temperature: float | None,
    max_new_tokens: int | None,
    ks: tuple[int, ...] | None,
    pass_at: float,
    by: str | None,
    split: Any,
    name: str | None,
    runs: str,
    as_json: bool,
) -> None:
    """Measure a policy on a task: mean score, pass@k, a table by difficulty.

    TASK is the name of a task, as in `task.name` of a recipe. Every rollout is kept, in a folder of its own.
    """
    from ramet.cli.eval import Measure, run
    from ramet.cli.players import Who

    who = Who(model, server, policy, tokenizer, api_key_from)
    measured = tuple(sorted({1, samples})) if ks is None else ks
    measure = Measure(problems, samples, temperature, max_new_tokens, measured, pass_at, by, split, seed)
    click.get_current_context().exit(run(task, who, measure, overrides, name=name, runs=runs, as_json=as_json))


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--reward", required=True, metavar="FILE.py:FUNCTION", help="The reward, or package.module:function.")
@click.option("--out", type=click.Path(path_type=Path), help="File to write; default: a new one beside the old.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@with_traceback
def rescore(run: Path, reward: str, out: Path | None, as_json: bool) -> None:
    """Judge the rollouts of a run again, by another reward.

    RUN is the folder of a run or of an evaluation. Its rollouts stay as they are.
    """
    from ramet.cli.rescore import run as rescored

    click.get_current_context().exit(rescored(run, reward, out, as_json))


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with ramet, by name."""
    folder = Path(str(resources.files("ramet"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_recipe(recipe: str) -> Path:
    """Return the TOML file that `recipe` means: a shipped recipe's name, a file, or the folder of a run.

    A name alone means the shipped recipe, whatever lies in the working folder; `./name` means the file or folder.
    """
    known = shipped_recipes()
    if recipe in known:
        return known[recipe]
    path = Path(recipe)
    path = path / "config.toml" if path.is_dir() else path
    if path.is_file():
        return path
    raise ConfigError(
        f"no recipe {recipe}: expected a shipped recipe, a TOML file, or the folder of a run",
        hint=nearest(recipe, known),
    )


if __name__ == "__main__":
    main(prog_name="ramet")
