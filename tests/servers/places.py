"""Servers in environments of their own, made on first use, and started as processes of this test run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import vllm_python as made_vllm_python
from transformers import PreTrainedModel

from ramet.models.tiny import tiny_llama, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 128
PATIENCE = 400.0
"""Seconds within which a server must answer after it was started."""


def vllm_python() -> Path:
    """Return an interpreter that has vLLM: `$RAMET_VLLM_PYTHON`, or the benchmarks' own, made on first use."""
    named = os.environ.get("RAMET_VLLM_PYTHON")
    return made_vllm_python(None if named is None else Path(named))


def serving_python() -> Path:
    """Return an interpreter that has `transformers serve`: `$RAMET_SERVE_PYTHON`, or one made on first use.

    It sees the packages of the environment that runs this, and has beside them what serving needs.
    """
    named = os.environ.get("RAMET_SERVE_PYTHON")
    if named is not None:
        return Path(named)
    folder = Path(__file__).parent / ".environments" / "transformers-serve"
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists():
        venv.create(folder, with_pip=True, clear=True)
        (folder.parent / ".gitignore").write_text("*\n", encoding="utf-8")
        inside = next((folder / "lib").glob("python*")) / "site-packages"
        (inside / "around.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "transformers[serving]"], check=True)
        stamp.touch()
    return python


def peaked(seed: int) -> PreTrainedModel:
    """Return a small model whose distributions are far from uniform."""
    return tiny_llama(tiny_tokenizer(), seed=seed, layers=2, context=CONTEXT, initializer_range=0.2)


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Running:
    """A server's process, in a session of its own, from `start` to `stop`; it may be killed and started again."""

    command: Sequence[str]
    environment: Mapping[str, str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, wait: bool = True) -> None:
        """Start it, and wait until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,
                env={**os.environ, **_QUIET, **self.environment},
                start_new_session=True,
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until it answers; raise with the end of its log where it ends, or takes too long."""
        assert self.process is not None
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.said()}")
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                    f"{self.url}/health", timeout=5
                ).close()
                return
            time.sleep(0.25)
        raise RuntimeError(f"the server did not answer within {PATIENCE:g} s:\n{self.said()}")

    def kill(self) -> None:
        """End it as a machine that loses its power does: kill -9, for all of its processes."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]


_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "PYTHONPATH": "",
}


@contextlib.contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str], port: int) -> Iterator[Running]:
    """Start a server for the block; a signal that ends the run ends the server as well."""
    with tempfile.TemporaryDirectory() as folder:
        server = Running(command, environment, port, Path(folder) / "log")
        before = signal.signal(signal.SIGTERM, _leave)
        try:
            server.start()
            yield server
        finally:
            server.kill()
            signal.signal(signal.SIGTERM, before)


def _leave(*_: object) -> None:
    raise SystemExit("ended by a signal")


@contextlib.contextmanager
def vllm(model: Path, *options: str, trained: bool = True, processed: bool = True) -> Iterator[Running]:
    """Serve the model in a folder by vLLM as "policy", in float32; `trained` makes it ready to take weights."""
    inside = str(ROOT / "src" / "ramet" / "policies" / "server" / "inside_vllm")
    port = free_port()
    command = [str(vllm_python()), "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", *options]
    command += ["--logprobs-mode", "processed_logprobs"] * processed
    command += ["--worker-extension-cls", "ramet_weights.Reloading"] * trained
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": inside} if trained else {}
    with _running(command, environment, port) as server:
        yield server


@contextlib.contextmanager
def transformers_serve(model: Path) -> Iterator[Running]:
    """Serve the model in a folder by `transformers serve`."""
    port = free_port()
    command = [str(serving_python()), "-W", "ignore", "-m", "transformers.cli.transformers", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with _running(command, {}, port) as server:
        yield server
