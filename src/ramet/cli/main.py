"""The command `ramet`. Nothing heavy is imported before a command needs it, so that `ramet --help` answers at once.

What a command is asked for goes to stdout, all else to stderr. Exit codes: 0 done, 1 failed, 2 a setting, a file or the
command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import click

from ramet import __version__
from ramet.errors import ConfigError, DataError, RametError, nearest

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
            ctx.exit(2 if isinstance(error, (ConfigError, DataError)) else 1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


def _show_error(error: RametError) -> None:
    from ramet.viewer.text import visible

    click.echo(f"error: {visible(error.message)}", err=True)
    if error.hint is not None:
        click.echo(f"hint: {visible(error.hint)}", err=True)


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
    from ramet.viewer.report import write_report

    click.echo(write_report(run))


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
