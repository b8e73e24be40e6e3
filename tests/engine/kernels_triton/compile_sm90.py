"""Compiles kernels ahead of time for sm_90, without a GPU, and reports what came out, as JSON.

A program of its own (python -m tests.engine.kernels_triton.compile_sm90 [all]), since one process
can not both interpret and compile.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.triton import (
    FIXED_TILE,
    SPLIT_TILE,
    key_tile,
    launch_options,
    long_tile_of,
)
from engine.kernels.triton import attention, gemm, norms, penalties, rotary, sampling

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
# name -> pattern in PTX; copies by cp.async take 16 bytes past L1 (cg) or fewer (ca)
INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"mma\.sync",
    "async_copies": r"cp\.async\.c[ga]\.",
    "local_memory": r"(ld|st)\.local",
}


@dataclass(frozen=True)
class Case:
    """`types` of the parameters that are no constants, in order; pointers are aligned."""

    name: str
    kernel: Any
    types: str
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    nulls: tuple[str, ...] = ()
    full: bool = field(default=False)  # only with `all`


def attention_case(name: str, *, full: bool = False, **changes: Any) -> Case:
    """`changes` of the constants; tiles as the engine chooses them for these."""
    scaled, head_dim = bool(changes.get("SCALED")), changes.get("HEAD_DIM", 128)
    partial, fixed = changes.get("PARTIAL", True), name.startswith("fixed")
    block_m = FIXED_TILE if fixed else SPLIT_TILE
    if not partial:
        block_m = long_tile_of(head_dim, deterministic=fixed, scaled=scaled)
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "GROUP_PADDED": 4, "HEAD_DIM": 128, "D_PADDED": 128,
        "BLOCK_SIZE": 16, "WINDOW": 0, "BLOCK_M": block_m, "CHUNK": 512,
        "BLOCK_N": key_tile(head_dim, deterministic=fixed, narrow=scaled and not partial),
        "PARTIAL": True, "FOLD": False, "SCALED": False, "DOT": tl.bfloat16, "PRECISION": "tf32",
        **changes,
    }  # fmt: skip
    kv = "*fp8e4nv" if constants["SCALED"] else "*bf16"
    scales = "*fp32 *fp32 " if constants["SCALED"] else ""
    types = f"*bf16 {kv} {kv} {scales}*bf16 *fp32 *fp32 *i32 *i32 *i32 *i32 *i32 fp32"
    return Case(
        f"attention {name}",
        attention.attention_kernel,
        types,
        constants,
        **launch_options(constants["BLOCK_M"], constants["HEAD_DIM"]),
        nulls=() if scales else ("key_scales_ptr", "value_scales_ptr"),
        full=full,
    )


def cases() -> Iterator[Case]:
    yield attention_case("decode")
    yield attention_case("prefill", PARTIAL=False)
    yield attention_case("fixed decode")
    yield attention_case("fixed prefill", PARTIAL=False, FOLD=True)
    yield attention_case("fp8 decode", SCALED=True)
    for dim, padded in ((64, 64), (80, 128), (96, 128), (128, 128), (256, 256)):
        sizes = {"HEAD_DIM": dim, "D_PADDED": padded, "full": True}
        yield attention_case(f"decode D{dim}", **sizes)
        yield attention_case(f"prefill D{dim}", PARTIAL=False, **sizes)
        yield attention_case(f"fp8 decode D{dim}", SCALED=True, **sizes)
        yield attention_case(f"fp8 prefill D{dim}", SCALED=True, PARTIAL=False, **sizes)
        yield attention_case(f"fixed decode D{dim}", **sizes)
        for scaled in (False, True):
            form = "fp8 " if scaled else ""
            wide = {"PARTIAL": False, "FOLD": True, "SCALED": scaled, **sizes}
            yield attention_case(f"fixed {form}prefill D{dim}", **wide)
    for group in (1, 2, 3, 5, 8):
        padded = triton.next_power_of_2(group)
        sizes = {"GROUP": group, "GROUP_PADDED": padded, "full": True}
        yield attention_case(f"decode G{group}", **sizes)
        yield attention_case(f"prefill G{group}", PARTIAL=False, **sizes)
    yield attention_case("decode window", WINDOW=4096, full=True)
    yield attention_case("prefill window", WINDOW=4096, PARTIAL=False, full=True)
    shape = {"KV_HEADS": 8, "GROUP": 4, "GROUP_PADDED": 4, "HEAD_DIM": 128}
    yield Case(
        "combine",
        attention.combine_kernel,
        "*bf16 *fp32 *fp32 *i32",
        {**shape, "D_PADDED": 128, "WINDOW": 0, "BLOCK_M": 16, "BLOCK_N": 64, "CHUNK": 512},
    )
    for add in (False, True):
        yield Case(
            f"norm add={add}",
            norms._norm_kernel,
            "*bf16 *bf16 *bf16 *bf16 *bf16 fp32",
            {"WIDTH": 4096, "BLOCK": 4096, "ADD": add},
            num_warps=8,
        )
    yield Case("silu", norms._gated_silu_kernel, "*bf16 *bf16", {"WIDTH": 14336, "BLOCK": 1024})
    for norm in (False, True):
        yield Case(
            f"rotary norm={norm}",
            rotary._rotate_and_store_kernel,
            ("*bf16 *bf16 *bf16" if norm else "*bf16") + " *fp32 *fp32 *i64 *i64"
            " *bf16 *bf16 *bf16 fp32",
            {**shape, "HALF_PADDED": 64, "NORM": norm, "SCALED": False, "LIMIT": 1e18},
            nulls=("key_scales_ptr", "value_scales_ptr")
            + (() if norm else ("q_norm_ptr", "k_norm_ptr")),
        )
    yield Case(
        "draw",
        sampling._draw_kernel,
        "*fp32 *fp32 *i64 *i64 i32 i32",
        {"BLOCK": sampling.BLOCK},
        num_warps=8,
    )
    yield Case("count", penalties._count_kernel, "*i64 *i64 *i64 i32 i32", {"BLOCK": 1024})
    yield Case("penalise", penalties._penalise_kernel, "*fp32 *i64 *i64 i32 i32", {"BLOCK": 4096})
    yield from gemm_cases()


def gemm_cases() -> Iterator[Case]:
    forms = {
        "dense": (16, "*bf16 *bf16", ("scale_ptr", "zero_ptr")),
        "int8": (8, "*bf16 *i8 *fp32", ("zero_ptr",)),
        "int4": (4, "*bf16 *u8 *fp32 *fp32", ()),
    }
    for form, (bits, inputs, nulls) in forms.items():
        for rows, partial in ((16, True), (32, True), (64, True), (64, False)):
            yield Case(
                f"gemm {form} {rows} {'split' if partial else 'whole'}",
                gemm._gemm_kernel,
                f"{inputs} *bf16 {'*fp32 ' if partial else ''}i32",
                {
                    "N": 4096,
                    "K": 4096,
                    "CHUNK_K": 1024,
                    "BLOCK_M": rows,
                    "BLOCK_N": gemm.BLOCK_N,
                    "BLOCK_K": 128 if bits == 4 else gemm.BLOCK_K,
                    "BITS": bits,
                    "BIAS": False,
                    "PARTIAL": partial,
                    "DOT": tl.bfloat16,
                    "PRECISION": "tf32",
                },
                num_warps=gemm.WARPS,
                num_stages=gemm.STAGES,
                nulls=(*nulls, "bias_ptr", *(() if partial else ("partial_ptr",))),
                full=rows == 32 or (rows == 16 and bits != 4),
            )
    yield Case(
        "sum chunks",
        gemm._sum_chunks_kernel,
        "*fp32 *bf16 i32",
        {"N": 4096, "CHUNKS": 4, "BIAS": False, "BLOCK": 1024},
        nulls=("bias_ptr",),
    )


def compile_case(case: Case) -> dict[str, Any]:
    """Registers, spills, shared memory and the instructions looked for."""
    constants = {**case.constants, **dict.fromkeys(case.nulls)}
    types = iter(case.types.split())
    signature = {
        name: "constexpr" if name in constants else next(types) for name in case.kernel.arg_names
    }
    assert next(types, None) is None, f"{case.name}: more types than parameters"
    places = {name: (index,) for index, name in enumerate(signature)}
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={
            places[name]: [["tt.divisibility", 16]]
            for name, type_ in signature.items()
            if type_.startswith("*")
        },
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    ptx = compiled.asm["ptx"]
    return {
        "name": case.name,
        "shared": compiled.metadata.shared,
        "specialised": [
            parameter.name
            for parameter in case.kernel.params
            if signature[parameter.name] in ("i32", "i64") and not parameter.do_not_specialize
        ],
        **usage(ptx),
        **{name: len(re.findall(what, ptx)) for name, what in INSTRUCTIONS.items()},
    }


def usage(ptx: str) -> dict[str, int]:
    """Registers and bytes of spills, as the assembler counts them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(PTXAS), "-v", "--gpu-name=sm_90a", str(path), "-o", f"{folder}/out"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert registers is not None
    assert spills is not None
    return {"registers": int(registers[1]), "spill_bytes": int(spills[1]) + int(spills[2])}


if __name__ == "__main__":
    wanted = set(sys.argv[1:])
    for case in cases():
        if "all" in wanted or case.name in wanted or (not wanted and not case.full):
            print(json.dumps(compile_case(case)), flush=True)
