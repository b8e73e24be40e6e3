"""OpenVINO GenAI's continuous-batching pipeline behind the least HTTP that a load needs.

Run by the rival's own interpreter, so it imports the standard library and openvino_genai only:
`python openvino_server.py MODEL.gguf PORT CACHE_GB`. OpenVINO GenAI ships no server; this one adds
as little as it can: one thread steps the pipeline, one event loop writes an SSE chunk a token. A
chunk's text is the token's id, so detokenising costs the rival nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

openvino_genai: Any = importlib.import_module("openvino_genai")

Tokens = list[int]
Deliver = Callable[[Tokens, bool], None]


class Engine:
    """Owns the pipeline and its thread. `deliver` is called on that thread, once a step."""

    def __init__(self, model: str, cache_gb: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = cache_gb
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self.tokenizer = self.pipeline.get_tokenizer()
        self._arrived = threading.Condition()
        self._waiting: list[tuple[Any, int, Deliver]] = []

    def count(self, prompt: str) -> tuple[Any, int]:
        ids = self.tokenizer.encode(prompt).input_ids
        return ids, int(ids.shape[-1])

    def add(self, ids: Any, max_tokens: int, deliver: Deliver) -> None:
        with self._arrived:
            self._waiting.append((ids, max_tokens, deliver))
            self._arrived.notify()

    def run(self) -> None:
        running: dict[int, tuple[Any, Deliver, int]] = {}
        next_id = 0
        while True:
            with self._arrived:
                while not self._waiting and not running:
                    self._arrived.wait()
                arrived, self._waiting = self._waiting, []
            for ids, max_tokens, deliver in arrived:
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens = max_tokens
                config.ignore_eos = True
                config.do_sample = False
                handle = self.pipeline.add_request(next_id, ids, config)
                running[next_id] = (handle, deliver, max_tokens)
                next_id += 1
            self.pipeline.step()
            for number, (handle, deliver, left) in list(running.items()):
                tokens: Tokens = []
                while handle.can_read():
                    for output in handle.read().values():
                        tokens += output.generated_ids
                left -= len(tokens)
                running[number] = (handle, deliver, left)
                ended = left <= 0 or "RUNNING" not in str(handle.get_status())
                if ended:
                    del running[number]
                if tokens or ended:
                    deliver(tokens, ended)


class Server:
    """HTTP/1.1, keep-alive, chunked answers; POST is a completion, GET is health or models."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = await reader.readexactly(length)
                if head.startswith(b"POST"):
                    await self._complete(json.loads(body), writer)
                else:
                    self._json(writer, {"object": "list", "data": [{"id": "openvino"}]})
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        ids, num_prompt = self.engine.count(body["prompt"])
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[Tokens, bool]] = asyncio.Queue()

        def deliver(tokens: Tokens, ended: bool) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, (tokens, ended))

        self.engine.add(ids, body.get("max_tokens", 16), deliver)
        stream = bool(body.get("stream"))
        if stream:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
        count, ended = 0, False
        while not ended:
            tokens, ended = await arrived.get()
            count += len(tokens)
            if stream and tokens:
                text = "".join(f" {token}" for token in tokens)
                self._event(writer, {"choices": [{"index": 0, "text": text}]})
        usage = {"prompt_tokens": num_prompt, "completion_tokens": count}
        if not stream:
            self._json(writer, {"choices": [{"index": 0, "text": ""}], "usage": usage})
            return
        last = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage}
        self._event(writer, last)
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(data).encode() + b"\n\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _json(self, writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


async def main(model: str, port: int, cache_gb: int) -> None:
    engine = Engine(model, cache_gb)
    threading.Thread(target=engine.run, daemon=True).start()
    server = await asyncio.start_server(Server(engine).serve, "127.0.0.1", port, limit=2**22)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
