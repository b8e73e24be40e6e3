"""The CPU kernels as a Python object: finds the compiled libraries, picks one, declares its calls.

Owns the C interface (api.h) as ctypes sees it and nothing else: no torch, no model.
`PACELINE_CPU_TIER` overrides the choice of instruction set, `PACELINE_CPU_FOLDER` the place of the
libraries (build.py --sanitize makes checked ones).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path

from engine.errors import ModelFileError

ABI = 10  # PACELINE_ABI of api.h
TIERS = ("avx512vnni", "avxvnni", "avx2", "neon", "generic")  # best first
TIER_VARIABLE = "PACELINE_CPU_TIER"
FOLDER_VARIABLE = "PACELINE_CPU_FOLDER"

KINDS = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2, "F32": 3, "F16": 4, "BF16": 5}
KV_KINDS = {"float32": 0, "int16": 1, "int8": 2}
LINEARS = ("q", "k", "v", "o", "gate", "up", "down", "embedding", "head")
NORMS = ("attention", "mlp", "q", "k", "final")
PHASES = ("embed", "norm", "qkv", "rope", "attention", "output", "mlp", "down", "head")
LIMITS = ("read_bytes", "int8_products", "int16_products", "fp32_products")
ERRORS = {
    -1: "a shape that the kernels do not support",
    -2: "a batch with a token, position, row bound or block id out of range",
    -3: "out of memory",
    -4: "a weight was never set",
}


class KernelError(RuntimeError):
    """A call into the kernels was refused; nothing was computed."""


class StaleLibrary(RuntimeError):
    """A library that was compiled from other sources than these; the message is one line."""


class Config(Structure):
    """paceline_config of api.h."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                *("hidden", "intermediate", "num_layers", "num_heads", "num_kv_heads"),
                *("head_dim", "vocab", "max_positions", "rotary_dim", "dense", "kv_kind"),
                *("num_blocks", "block_size", "max_tokens", "num_threads"),
            )
        ),
        ("norm_eps", c_float),
        ("weight_bytes", c_uint64),
    )


class Batch(Structure):
    """paceline_batch of api.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_tokens", "num_rows", "table_stride", "num_outputs")),
        *(
            (name, c_void_p)
            for name in ("token_ids", "positions", "row_starts", "block_tables", "outputs")
        ),
    )


class Choice(Structure):
    """paceline_choice of api.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("rows", c_int32),
        ("vocab", c_int32),
        *((name, c_void_p) for name in ("masks", "mask_rows")),
        *((name, c_int32) for name in ("num_masks", "mask_words")),
        ("parameters", c_void_p),
        ("parameter_bytes", c_int64),
        *((name, c_void_p) for name in ("indices", "given")),
        *((name, c_void_p) for name in ("tokens", "peaks", "logprobs", "top", "top_ids")),
        ("max_top", c_int32),
    )


# name -> (result, arguments); arrays are passed as addresses
_SIGNATURES = {
    "paceline_abi": (c_int32, ()),
    "paceline_tier": (c_char_p, ()),
    "paceline_tier_runs": (c_int32, (c_char_p,)),
    "paceline_packed_bytes": (c_uint64, (c_int32, c_int32, c_int32)),
    "paceline_create": (
        c_void_p,
        (POINTER(Config), c_void_p, c_void_p, c_void_p, POINTER(c_int32)),
    ),
    "paceline_destroy": (None, (c_void_p,)),
    "paceline_set_linear": (
        c_int32,
        (c_void_p, *(c_int32,) * 5, c_void_p, c_uint64, c_void_p),
    ),
    "paceline_set_norm": (c_int32, (c_void_p, c_int32, c_int32, c_void_p)),
    "paceline_forward": (c_int32, (c_void_p, POINTER(Batch), c_void_p)),
    "paceline_logits": (c_int32, (c_void_p, c_void_p, c_int32, c_void_p)),
    "paceline_copy_blocks": (c_int32, (c_void_p, c_void_p, c_int32)),
    "paceline_choose": (c_int32, (c_void_p, POINTER(Choice))),
    "paceline_choose_alone": (c_int32, (c_int32, POINTER(Choice))),
    "paceline_profile": (None, (c_void_p, c_void_p)),
    "paceline_multiply": (
        c_int32,
        (*(c_int32,) * 3, c_void_p, c_uint64, c_void_p, c_int32, c_void_p, c_void_p),
    ),
    "paceline_attend": (
        c_int32,
        (*(c_int32,) * 7, *(c_void_p,) * 3, c_int32, *(c_void_p,) * 4),
    ),
    "paceline_limit": (c_double, (c_int32, c_int32)),
    "paceline_exp": (None, (c_void_p, c_void_p, c_int32)),
    "paceline_widen_half": (None, (c_void_p, c_void_p, c_int32)),
}


def check(code: int) -> None:
    """Raise KernelError for a negative result."""
    if code < 0:
        raise KernelError(ERRORS.get(code, f"error {code}"))


@cache
def open_library(path: Path) -> ctypes.CDLL:
    """Load one library and declare its functions. It must suit this CPU.

    Raises OSError for what cannot be loaded here, StaleLibrary.
    """
    library = ctypes.CDLL(str(path))
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        found = library.paceline_abi()
    except AttributeError:
        found = None
    if found != ABI:
        raise StaleLibrary(
            "the CPU kernels are older than this code; "
            "rebuild with `python -m engine.kernels.cpu.build`"
        )
    return library


def library_path(tier: str) -> Path:
    folder = Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parent)
    return folder / f"paceline_{tier}.so"


@cache
def available_tiers() -> tuple[str, ...]:
    """Tiers that were built and that this CPU runs, best first."""
    built = [tier for tier in TIERS if library_path(tier).is_file()]
    if "generic" not in built:
        return ()
    if _fault("generic") is not None:
        return ()
    runs = open_library(library_path("generic")).paceline_tier_runs
    return tuple(tier for tier in built if runs(tier.encode()) and _fault(tier) is None)


def why_missing() -> str | None:
    """Why there are no kernels here, in a few words; None if there are."""
    if available_tiers():
        return None
    if not library_path("generic").is_file():
        return "the native kernels were not built (no C++ compiler at install)"
    return _fault("generic")


def _fault(tier: str) -> str | None:
    """Why a library that was built cannot be used."""
    try:
        open_library(library_path(tier))
    except OSError:
        return "the native kernels were built for another machine"
    except StaleLibrary as error:
        return str(error)
    return None


def load_library(tier: str | None = None) -> ctypes.CDLL | None:
    """The library of `tier`, by default of $PACELINE_CPU_TIER or the best; None if none was built.

    Raises ModelFileError for a tier that is not available here.
    """
    wanted = tier or os.environ.get(TIER_VARIABLE)
    tiers = available_tiers()
    if not tiers and wanted is None:
        return None
    if wanted is not None and wanted not in tiers:
        there = ", ".join(tiers) or "none"
        raise ModelFileError(f"CPU tier {wanted!r} is not available here (there are: {there})")
    return open_library(library_path(wanted or tiers[0]))
