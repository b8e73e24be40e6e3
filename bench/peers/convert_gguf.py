"""Turn a GGUF file into a Hugging Face directory, for rivals that read nothing else.

Run by the interpreter of a rival that has transformers: `python convert_gguf.py GGUF FOLDER`. The
weights are the file's, dequantised to float32. The end-of-sequence id is left out of the generation
config, so that a server without `ignore_eos` also answers to the full length.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(source: Path, folder: Path) -> None:
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.generation_config.eos_token_id = None
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
