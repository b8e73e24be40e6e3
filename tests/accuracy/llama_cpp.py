"""Top log-probabilities from llama.cpp's server, prefix by prefix.

Owns one llama-server process on a free port of this machine. Prompts are token ids, so that no
tokenizer has a say; the server keeps the prefix, so that a position costs one token.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray

NUM_TOP = 200


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(server: Path, model: Path, threads: int) -> Iterator[httpx.Client]:
    """The server, ready, with its default cache types; ended on leaving."""
    port = _free_port()
    command = [
        *(str(server), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--parallel", "1", "--ctx-size", "2048", "--threads", str(threads), "--no-webui"),
    ]
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            _wait_until_ready(process, client)
            yield client
        finally:
            process.terminate()


def _wait_until_ready(process: subprocess.Popen[bytes], client: httpx.Client) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with {process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError("llama-server was not ready in a minute")


def top_logprobs(
    client: httpx.Client, prefix: list[int]
) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Ids and natural log-probabilities of what may follow, before any sampling.

    None where the end of text is likeliest: the server then says nothing.
    """
    answer = client.post(
        "/completion",
        json={
            "prompt": prefix,
            "n_predict": 1,
            "n_probs": NUM_TOP,
            "temperature": 0.0,
            "cache_prompt": True,
            "post_sampling_probs": False,
        },
    )
    answer.raise_for_status()
    tokens = answer.json().get("completion_probabilities")
    if not tokens:
        return None
    top = tokens[0]["top_logprobs"]
    ids = np.array([entry["id"] for entry in top], dtype=np.int64)
    return ids, np.array([entry["logprob"] for entry in top])
