"""A real vLLM API server, `vllm serve`, in processes of its own: started, asked and scraped over HTTP."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.lmcache.harness import ENGINE_TIMEOUT_S, KVREG, engine_command, environment, free_port, prompt

MODEL_NAME = "tiny"
Found = TypeVar("Found")


class ApiServer:
    """`vllm serve` on a free port; its ledgers go to `ledgers`, its whole output to `log`."""

    def __init__(self, folder: Path, model: Path, transfer: dict[str, Any], *options: str) -> None:
        self.log = folder / "vllm.log"
        self.ledgers = folder / "ledgers"
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        transfer_config = {**KVREG, "kv_connector_extra_config": transfer}
        command = engine_command(
            sys.executable, "-m", "tests.lmcache.serve", "serve", str(model), "--served-model-name", MODEL_NAME,
            "--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16",
            "--max-model-len", "2048", "--max-num-seqs", "4", "--num-gpu-blocks-override", "160",
            "--kv-transfer-config", json.dumps(transfer_config), *options,
        )  # fmt: skip
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "KVREG_LEDGER_DIR": str(self.ledgers), "KVREG_INSTANCE": "replica"}
        started_with = environment(variables)
        started_with.pop("PROMETHEUS_MULTIPROC_DIR", None)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=started_with, process_group=0)

    def until(self, look: Callable[[], Found | None], what: str) -> Found:
        """What `look` finds once it finds something, while the engine lives."""
        deadline = time.monotonic() + ENGINE_TIMEOUT_S
        while not (found := look()):
            assert self.process.poll() is None, f"ended before {what}:\n{self.text[-6000:]}"
            assert time.monotonic() < deadline, f"never {what}:\n{self.text[-6000:]}"
            time.sleep(0.2)
        return found

    def until_ready(self) -> None:
        """Wait until it answers."""
        self.until(lambda: self._get("/health") is not None, "/health answered")

    def complete(self, seed: int, tokens: int) -> None:
        """One completion of a prompt of token ids."""
        asked = {"model": MODEL_NAME, "prompt": prompt(seed, tokens), "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        headers = {"Content-Type": "application/json", "Connection": "close"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request, timeout=ENGINE_TIMEOUT_S) as answer:
            completion = json.load(answer)
        assert completion["usage"]["prompt_tokens"] == tokens

    def scrape(self) -> str:
        """What /metrics says now."""
        text = self._get("/metrics")
        assert text is not None, self.text[-6000:]
        return text

    def ledgers_text(self) -> str:
        """All its ledgers, one after the other, as node_exporter would read them; empty while there are none."""
        return "".join(path.read_text() for path in sorted(self.ledgers.glob("*.prom")))

    @property
    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def _get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
                return str(answer.read().decode())
        except OSError:
            return None

    def kill(self) -> None:
        """End it and every process that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def api_server(folder: Path, model: Path, transfer: dict[str, Any], *options: str) -> Iterator[ApiServer]:
    """An API server that is starting, killed at the end."""
    folder.mkdir(parents=True)
    starting = ApiServer(folder, model, transfer, *options)
    try:
        yield starting
    finally:
        starting.kill()
