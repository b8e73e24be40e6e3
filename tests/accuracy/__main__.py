"""Accuracy of quantised inference against fp32 of the same dequantised weights, on real text.

    python -m tests.accuracy [--positions 2000] [--llama-positions 200] [--model FILE]

The native kernels are compared at every position over the whole vocabulary. llama.cpp, where
bench/peers has installed it, gives its 200 likeliest tokens at every tenth position or so: KL is
then of those and one bucket for the rest, and the native figure at those positions stands beside
it, through the same 200 tokens. JSON goes to bench/out/accuracy.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from engine.cpu_count import usable_cores
from engine.default_model import resolve_model
from server.tokenizer import load_tokenizer
from tests.accuracy import llama_cpp
from tests.accuracy.measures import Accuracy, Floats, coarse_kl, compare, log_softmax
from tests.accuracy.models import Logits, native, reference
from tests.accuracy.texts import windows

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench" / "out" / "accuracy.json"
LLAMA = ROOT / ".venv-peers" / "llama.cpp" / "build" / "bin" / "llama-server"


def distributions(logits: Logits, texts: list[list[int]]) -> Floats:
    """Log-probabilities at every position of all texts but the last of each, in float32."""
    return np.concatenate([log_softmax(logits(text[:-1])).astype(np.float32) for text in texts])


def against_llama_cpp(
    model: Path, texts: list[list[int]], exact: Floats, ours: Floats, count: int
) -> dict[str, Any]:
    length = len(texts[0]) - 1
    step = max(1, len(texts) * length // count)
    theirs_kl, ours_kl, theirs_same, ours_same = [], [], [], []
    with llama_cpp.running(LLAMA, model, usable_cores()) as client:
        for number, text in enumerate(texts):
            for position in range(step - 1, length, step):
                top = llama_cpp.top_logprobs(client, text[: position + 1])
                if top is None:
                    continue
                ids, logprobs = top
                row = number * length + position
                theirs_kl.append(coarse_kl(exact[row], ids, logprobs))
                ours_kl.append(coarse_kl(exact[row], ids, ours[row][ids]))
                best = exact[row].argmax()
                theirs_same.append(best == ids[logprobs.argmax()])
                ours_same.append(best == ours[row].argmax())
    return {
        "positions": len(theirs_kl),
        "tokens_seen": llama_cpp.NUM_TOP,
        "kl": float(np.mean(theirs_kl)),
        "top1": float(np.mean(theirs_same)),
        "native_kl": float(np.mean(ours_kl)),
        "native_top1": float(np.mean(ours_same)),
    }


def line(name: str, result: Accuracy) -> str:
    return (
        f"{name:24} KL {result.kl:.5f} (p99 {result.kl_p99:.4f})  top-1 {result.top1:.2%}  "
        f"perplexity {result.perplexity:.3f} (fp32 {result.reference_perplexity:.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of the CPU kernels on real text.")
    parser.add_argument("--positions", type=int, default=2000)
    parser.add_argument("--llama-positions", type=int, default=200, help="0: without llama.cpp")
    parser.add_argument("--model", default=None, help="default: the embedded one")
    given = parser.parse_args()
    model = resolve_model(given.model)
    texts = windows(load_tokenizer(model), given.positions)
    targets = np.concatenate([np.array(text[1:]) for text in texts])
    exact = distributions(reference(model), texts)
    found: dict[str, Any] = {"model": model.name}
    shown: Floats | None = None
    kv_types = {"native": "int8", "native, int16 KV": "int16", "native, fp32 KV": "float32"}
    for name, kv_type in kv_types.items():
        logits = native(model, kv_type=kv_type, longest=len(texts[0]))
        ours = distributions(logits, texts)
        shown = ours if shown is None else shown
        result = compare(exact, ours, targets)
        found[name] = asdict(result)
        print(line(name, result), flush=True)
    summary = f"accuracy: native KL {found['native']['kl']:.5f}"
    if given.llama_positions and LLAMA.is_file() and model.suffix == ".gguf":
        assert shown is not None
        theirs = against_llama_cpp(model, texts, exact, shown, given.llama_positions)
        found["llama.cpp"] = theirs
        summary += (
            f"; at {theirs['positions']} positions native {theirs['native_kl']:.5f} "
            f"({theirs['native_top1']:.1%} top-1), llama.cpp {theirs['kl']:.5f} "
            f"({theirs['top1']:.1%} top-1)"
        )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(summary)


if __name__ == "__main__":
    main()
