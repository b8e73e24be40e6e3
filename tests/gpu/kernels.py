"""Each kernel on the device: right against its twin in float32, and timed against its floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from engine.attention.library import Library, flash3, rows_of
from engine.attention.reference import ReferenceAttention
from engine.attention.triton import TritonAttention
from engine.batch import Batch
from engine.decoder import gated_silu as gated_silu_twin
from engine.gpu_linear import Float8Linear
from engine.kernels.triton import gemm
from engine.kernels.triton.norms import add_rms_norm, gated_silu
from engine.kv_cache import KVCache
from engine.sampler import SLOT_COLUMNS
from tests.gpu.guard import Result, guarded, one
from tests.gpu.timing import against_floor, seconds
from tests.gpu.varlen import varlen


@dataclass(frozen=True)
class Heads:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_heads: int


@dataclass(frozen=True)
class Sizes:
    """What is measured; small for a dry run."""

    heads: Heads
    decodes: tuple[tuple[int, int], ...]  # batch, context
    prefills: tuple[int, ...]
    products: tuple[tuple[int, int], ...]  # outputs, inputs
    rows: tuple[int, ...]  # of products
    width: int
    inner: int
    vocab: int
    repeats: int
    dtype: torch.dtype


FULL = Sizes(
    heads=Heads(1, 8, 128, 32),
    decodes=((1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 8192), (8, 8192), (64, 8192)),
    prefills=(2048, 8192),
    products=((28672, 4096), (4096, 14336)),  # each form and shape is compiled
    rows=(1, 64, 2048),
    width=4096,
    inner=14336,
    vocab=151936,
    repeats=20,
    dtype=torch.bfloat16,
)
DRY = Sizes(
    heads=Heads(1, 2, 16, 4),
    decodes=((1, 130), (3, 40)),
    prefills=(40,),
    products=((48, 64),),
    rows=(1, 20),
    width=64,
    inner=96,
    vocab=320,
    repeats=1,
    dtype=torch.float32,
)
BLOCK_SIZE = 16
# Of the norm: bfloat16 has 8 bits, float8 has 4.
LIMIT, FLOAT8_LIMIT = 1e-2, 6e-2


def batch_of(
    starts: list[int], lengths: list[int], device: torch.device, *, block_size: int = BLOCK_SIZE
) -> Batch:
    """Rows with blocks of their own, one after the other."""
    ends = np.array(starts) + np.array(lengths)
    counts = -(-ends // block_size)
    tables = np.full((len(ends), counts.max()), -1, dtype=np.int32)
    first = np.cumsum(counts) - counts
    for row, count in enumerate(counts):
        tables[row, :count] = first[row] + np.arange(count)
    positions = np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)])
    rows = np.repeat(np.arange(len(ends)), lengths)
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    return Batch(
        starts=np.array(starts),
        lengths=np.array(lengths),
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        block_tables=tables,
        token_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=torch.from_numpy(positions).to(device),
        kv_slots=torch.from_numpy(slots.astype(np.int64)).to(device),
    )


def normal(shape: tuple[int, ...], sizes: Sizes, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(sizes.dtype)


def error_of(actual: Tensor, expected: Tensor, *, limit: float = LIMIT) -> Result:
    """Norm of the difference over the norm of what was expected."""
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    return {"relative_error": error, "right": error < limit}


def attention_of(
    starts: list[int],
    lengths: list[int],
    sizes: Sizes,
    device: torch.device,
    *,
    float8: bool = False,
    **options: bool,
) -> Result:
    heads, batch = sizes.heads, batch_of(starts, lengths, device)
    num_blocks = int(batch.block_tables.max()) + 1
    cache = KVCache(
        heads,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.float8_e4m3fn if float8 else sizes.dtype,
        device=device,
        scales=torch.full((1, 2, heads.num_kv_heads), 0.5, device=device) if float8 else None,
    )
    cache.layers[:, :, :num_blocks] = normal(cache.layers[:, :, :num_blocks].shape, sizes, device)
    attention = TritonAttention(cache, num_heads=heads.num_heads, windows=(None,), **options)
    columns = attention.columns(batch, None)
    q = normal((len(batch.token_ids), heads.num_heads, heads.head_dim), sizes, device)
    out = torch.empty_like(q)
    took = seconds(lambda: attention.run(columns, 0, q, out), device, repeats=sizes.repeats)
    kv_width = heads.num_kv_heads * heads.head_dim
    pairs = sum(n * s + n * (n + 1) // 2 for s, n in zip(starts, lengths, strict=True))
    size = sizes.dtype.itemsize
    result: Result = {
        **against_floor(
            took,
            num_bytes=2 * int(batch.ends.sum()) * kv_width * cache.layers.dtype.itemsize
            + size * 2 * q.numel(),
            flops=4 * pairs * heads.num_heads * heads.head_dim,
        ),
    }
    if len(q) * int(batch.ends.max()) <= 1 << 23:  # the twin is slow
        reference = ReferenceAttention(cache, num_heads=heads.num_heads, windows=(None,))
        expected = reference._attend(reference._step(batch, None), 0, q)
        result |= error_of(out, expected)
    return result


def attentions(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    for mode in ("", " deterministic"):
        options = {"deterministic": bool(mode)}
        for rows, context in sizes.decodes:
            step = [context - 1] * rows, [1] * rows
            make = partial(attention_of, *step, sizes, device, **options)
            yield from one(f"decode attention {rows} x {context}{mode}", make)
        for length in sizes.prefills:
            make = partial(attention_of, [0], [length], sizes, device, **options)
            yield from one(f"prefill attention {length}{mode}", make)
    for rows, context in sizes.decodes:
        step = [context - 1] * rows, [1] * rows
        make = partial(attention_of, *step, sizes, device, float8=True)
        yield from one(f"decode attention {rows} x {context} float8", make)


def libraries(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """Prefills by what is there besides our kernels, and how far the results are apart."""
    found: list[tuple[str, Library, int]] = []
    if device.type == "cuda" and find_spec("flash_attn_interface") is not None:
        found.append(("FlashAttention-3", flash3, BLOCK_SIZE))
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if device.type == "cuda" and version >= (2, 12):
        found.append(("varlen_attn", varlen, 256))
    if not found:
        yield {"name": "other attention", "absent": True}
    for name, library, block_size in found:
        for length in sizes.prefills:
            yield from guarded(name, library_of(name, library, block_size, length, sizes, device))


def library_of(
    name: str,
    library: Library,
    block_size: int,
    length: int,
    sizes: Sizes,
    device: torch.device,
) -> Iterator[Result]:
    heads, batch = sizes.heads, batch_of([0], [length], device, block_size=block_size)
    num_blocks = int(batch.block_tables.max()) + 1
    cache = KVCache(
        heads, num_blocks=num_blocks, block_size=block_size, dtype=sizes.dtype, device=device
    )
    cache.layers[:, :, :num_blocks].normal_()
    keys, values = cache.layers[0]
    rows = rows_of(batch, cache)
    q = normal((length, heads.num_heads, heads.head_dim), sizes, device)
    ours = torch.empty_like(q)
    attention = TritonAttention(cache, num_heads=heads.num_heads, windows=(None,))
    attention.run(attention.columns(batch, None), 0, q, ours)
    theirs = library(q, keys, values, rows, window=None)
    took = seconds(
        lambda: library(q, keys, values, rows, window=None), device, repeats=sizes.repeats
    )
    pairs = length * (length + 1) // 2
    yield {
        "name": f"{name} prefill {length}",
        **against_floor(took, flops=4 * pairs * heads.num_heads * heads.head_dim),
        **error_of(ours, theirs),
    }


FORMS: dict[str, Callable[[Tensor], gemm.Weight]] = {
    "dense": gemm.dense,
    "int8": gemm.quantise_int8,
    "int4": gemm.quantise_int4,
}


def products(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """Ours in each form, and torch's own beside them."""
    for outputs, inputs in sizes.products:
        weight = normal((outputs, inputs), sizes, device) * inputs**-0.5
        for rows in sizes.rows:
            x = normal((rows, inputs), sizes, device)
            for form in ("torch", "float8", *FORMS):
                if form in ("int8", "int4") and rows > 64:  # their place is a small batch
                    continue
                make = partial(product_of, form, x, weight, device, repeats=sizes.repeats)
                yield from one(f"{form} {rows} x {inputs} -> {outputs}", make)


def product_of(
    form: str, x: Tensor, weight: Tensor, device: torch.device, *, repeats: int
) -> Result:
    num_bytes, exact, limit = weight.nbytes, weight, LIMIT
    work: Callable[[], Tensor]
    if form == "torch":
        work = partial(torch.nn.functional.linear, x, weight)
    elif form == "float8":
        work, num_bytes, limit = (
            partial(Float8Linear(weight, None), x),
            weight.numel(),
            FLOAT8_LIMIT,
        )
    else:
        stored = FORMS[form](weight)
        tile_rows = gemm.FIXED_ROWS if form == "dense" else None
        work = partial(gemm.multiply, x, stored, tile_rows=tile_rows)
        num_bytes, exact = stored.data.nbytes, gemm.dequantise(stored)
    took = seconds(work, device, repeats=repeats)
    moved = num_bytes + x.element_size() * len(x) * sum(weight.shape)
    return {
        **against_floor(took, num_bytes=moved, flops=2 * len(x) * weight.numel()),
        **error_of(work(), x.double() @ exact.double().t(), limit=limit),
    }


def floors(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """What this device reaches in a plain copy and in a dense product, beside what is assumed."""
    size = (1 << 30) if device.type == "cuda" else (1 << 16)
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    yield from one(
        f"copy of {size} bytes",
        lambda: against_floor(seconds(copy, device, repeats=sizes.repeats), num_bytes=2 * size),
    )
    side = 8192 if device.type == "cuda" else 64
    square = normal((side, side), sizes, device)
    product = partial(torch.mm, square, square)
    yield from one(
        f"product of {side} x {side} matrices",
        lambda: against_floor(seconds(product, device, repeats=sizes.repeats), flops=2 * side**3),
    )


def elementwise(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    size = sizes.dtype.itemsize
    for rows in (sizes.rows[0], sizes.rows[-1]):
        hidden, delta = (normal((rows, sizes.width), sizes, device) for _ in range(2))
        weight = normal((sizes.width,), sizes, device)
        took = seconds(
            lambda h=hidden, d=delta, w=weight: add_rms_norm(h, d, w, 1e-5),
            device,
            repeats=sizes.repeats,
        )
        yield {
            "name": f"add + norm {rows} x {sizes.width}",
            **against_floor(took, num_bytes=4 * hidden.numel() * size),
        }
        x = normal((rows, 2 * sizes.inner), sizes, device)
        took = seconds(lambda x=x: gated_silu(x), device, repeats=sizes.repeats)
        yield {
            "name": f"silu x up {rows} x {sizes.inner}",
            **against_floor(took, num_bytes=1.5 * x.numel() * size),
            **error_of(gated_silu(x), gated_silu_twin(x.clone())),
        }


def draws(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """64 rows by top_k and top_p, and by neither; a row's bytes are its logits, read once."""
    from engine.kernels.triton.sampling import draw

    rows = 64 if device.type == "cuda" else 2
    logits = torch.randn((rows, sizes.vocab), device=device) * 3
    for ranked in (False, True):
        columns = np.zeros(rows, dtype=SLOT_COLUMNS)
        columns["temperature"], columns["top_p"] = 1.0, 0.95 if ranked else 1.0
        columns["top_k"], columns["ranked"] = 50 if ranked else sizes.vocab, ranked
        columns["seed"] = np.arange(rows)
        peaks, token_ids = logits.max(1)
        everything = np.arange(rows)
        took = seconds(
            lambda c=columns, p=peaks, t=token_ids, r=everything: draw(
                logits, p, t, c, rows=r, indices=r
            ),
            device,
            repeats=sizes.repeats,
        )
        name = "draw by top_k and top_p" if ranked else "draw"
        yield {
            "name": f"{name} {rows} x {sizes.vocab}",
            **against_floor(took, num_bytes=logits.numel() * 4),
        }


def measure(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    parts = {
        "floors": floors,
        "attention": attentions,
        "libraries": libraries,
        "elementwise": elementwise,
        "draws": draws,
        "products": products,
    }
    for name, part in parts.items():
        yield from guarded(name, part(sizes, device))
