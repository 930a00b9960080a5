"""`ramet train`: one run, watched."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ramet.cli.progress import Progress
from ramet.config import TrainConfig
from ramet.events import CheckpointWritten
from ramet.interrupts import termination_as_interrupt


def run(config: TrainConfig, resume: bool = False) -> int:
    """Train, show the progress on stderr and the results on stdout; return the exit code, 0 or 130.

    After an interrupt or an error, the last line but the error's own says where the checkpoint is.
    """
    # Loaded here, so that a misspelt setting is reported before torch has loaded.
    quiet_libraries()
    from ramet.run_folder import refuse_existing
    from ramet.trainer import Trainer

    if not resume:
        refuse_existing(config.folder)  # before a model is loaded

    progress = Progress()
    try:
        with progress, termination_as_interrupt():
            result = Trainer.from_config(config, watcher=progress, resume=resume).train()
    except BaseException as error:
        if progress.checkpoint is not None or isinstance(error, KeyboardInterrupt):
            click.echo(_where_it_stopped(config.folder, progress.checkpoint), err=True)
        if isinstance(error, KeyboardInterrupt):
            return 130
        raise
    if result.interrupted:
        click.echo(_where_it_stopped(result.folder, progress.checkpoint), err=True)
        return 130
    progress.show_results()
    click.echo(f"report: {_report(result.folder)}")
    click.echo(f"run: {result.folder}")
    return 0


def _where_it_stopped(folder: Path, checkpoint: CheckpointWritten | None) -> str:
    if checkpoint is None:
        return "stopped before a checkpoint was written"
    return (
        f"stopped after step {checkpoint.step}, checkpoint: {checkpoint.path}\n"
        f"go on with: ramet train {shlex.quote(str(folder))} --resume"
    )


def _report(folder: Path) -> Path:
    from ramet.viewer.report import write_report

    return write_report(folder)


def quiet_libraries() -> None:
    """Keep other libraries' progress bars and one notice of torch's own imports out of the one progress line."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
