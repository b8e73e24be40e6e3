"""Builds the core of a real model: device, kernels, size of the KV cache, engine, warm-up.

The only file of server/ that builds engines. Everything heavy is imported inside functions: the
process imports this file with or without torch. Knows no socket, no HTTP and no text.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelFileError
from scheduler.limits import SchedulerLimits
from scheduler.loop import Engine
from scheduler.policy import POLICIES, Policy, max_total_tokens
from scheduler.types import KVCapacity
from server.cache_size import size_cache
from server.config import EngineConfig
from server.grammar_inbox import Compiler
from server.wire import CoreInfo, Plan, Start

if TYPE_CHECKING:
    import torch

    from engine.grammar import GrammarCompiler
    from engine.loading import LoadedModel, ModelFiles
    from engine.model_config import ModelConfig
    from engine.native_runner import NativeRunner
    from engine.step_engine import StepEngine
    from engine.torch_engine import TorchEngine
    from engine.weights import LayerChange

log = logging.getLogger("paceline.core")

Report = Callable[[str, int, int], None]  # stage, done, total

_CPU_WARM_UP = 8  # tokens


@dataclass(frozen=True, slots=True)
class Core:
    """What a core consists of, once it is built."""

    engine: Engine
    limits: SchedulerLimits
    policy: Policy
    info: CoreInfo
    depth: int
    grammars: Compiler | None = None
    kernel_seconds: Callable[[], dict[str, float]] | None = None  # by phase, since the last call


def import_libraries() -> None:
    """What an engine needs, ahead of time: while the server is on its way to the Start message.

    torch is among it only where it is sure to be used: it takes a second and 200 MB.
    """
    gc.disable()  # imports make no garbage worth a tenth of their time
    with contextlib.suppress(ImportError):  # build_core meets the same, and it is reported
        import engine.native_runner
        from engine.kernels.cpu.library import available_tiers

        if _may_have_cuda() or not available_tiers():
            import engine.torch_engine  # noqa: F401
    gc.enable()


def _may_have_cuda() -> bool:
    """Whether torch is worth asking: without a driver there is no device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()  # torch calls AMD's GPUs cuda too
    return True


@dataclass(frozen=True, slots=True)
class Packed:
    """A native model in memory: all that needs no fact of the tokenizer."""

    config: EngineConfig
    limits: SchedulerLimits
    model: ModelConfig
    runner: NativeRunner
    capacity: KVCapacity
    weights: str
    formula: str
    num_threads: int
    seconds: float = 0.0  # that it took, if early

    def suits(self, start: Start) -> bool:
        named = replace(self.config, served_model_name=start.config.served_model_name)
        return named == start.config and self.limits == start.limits


def pack_early(plan: Plan) -> Packed | None:
    """For a Start that is still on its way; None for whatever build_core has to do or to say."""
    from engine.default_model import resolve_model
    from engine.loading import open_model
    from engine.native_runner import native_engine

    begin = time.monotonic()
    config = plan.config
    try:
        if config.model and not Path(config.model).exists():
            return None  # a hub name, or a mistake
        path = resolve_model(config.model or None)
        config = replace(config, model=str(path))
        device = _choose_device(config.device)
        files = open_model(path)
        if _choose_kernels(config, device, files.config)[0] != "native":
            return None
        packed = _pack(config, plan.limits, files)
        # Any engine's first steps touch the memory of all; its blocks are nobody's afterwards.
        engine = native_engine(packed.runner, capacity=packed.capacity)
        engine.warm_up(max_step_tokens=min(_CPU_WARM_UP, plan.limits.max_step_tokens))
    except Exception:  # build_core meets the same, and it is reported
        return None
    return replace(packed, seconds=time.monotonic() - begin)


def build_core(start: Start, report: Report, packed: Packed | None = None) -> Core:
    """The core of a real model, warm. Raises ModelFileError for what a person can put right.

    `packed` spares some of the work if it is what `start` asks for.
    """
    from engine.loading import open_model

    begin = time.monotonic()
    config, limits = start.config, start.limits
    report("reading the model", 0, 0)
    device = _choose_device(config.device)
    if packed is not None and packed.suits(start):
        begin -= packed.seconds
        model, kernels = packed.model, "native"
        built = _build_native(start, packed)
    else:
        files = open_model(Path(config.model))
        model = files.config
        kernels, reason = _choose_kernels(config, device, model)
        if reason:
            log.warning("reference kernels: %s", reason)
        if kernels == "native":
            report("packing weights", 0, 0)
            built = _build_native(start, _pack(config, limits, files))
        else:
            build = {"triton": _build_cuda, "torch": _build_torch}[kernels]
            built = build(start, files, device, report)
    engine, capacity = built.engine, built.engine.capacity
    report("warming up", 0, 0)
    # A GPU must meet its worst step before clients do; a CPU only has to load its libraries.
    enough = limits.max_step_tokens if device == "cuda" else _CPU_WARM_UP
    engine.warm_up(max_step_tokens=min(enough, limits.max_step_tokens))
    info = CoreInfo(
        model_name=config.served_model_name,
        max_model_len=max_total_tokens(capacity),
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        eos_token_ids=_ends(start, model, model.vocab_size),
        capacity=capacity,
        limits=limits,
        dtype=built.weights,
        device=_device_name(device, built.num_threads),
        kernels=kernels,
        notes=built.notes,
        load_seconds=time.monotonic() - begin,
    )
    return Core(
        engine=engine,
        limits=replace(limits, watermark_blocks=capacity.num_blocks // 100),
        policy=POLICIES[config.policy](),
        info=info,
        # Only a device of its own can compute while the next step is planned.
        depth=(device == "cuda") if config.depth is None else config.depth,
        grammars=built.grammars,
        kernel_seconds=built.kernel_seconds,
    )


def _ends(start: Start, model: ModelConfig, size: int) -> tuple[int, ...]:
    """What ends an answer, as any of the files says; a tokenizer may name what no row is for."""
    return tuple(sorted(e for e in {*model.eos_token_ids, *start.eos_token_ids} if e < size))


def _grammars(start: Start, model: ModelConfig) -> GrammarCompiler | None:
    """None without a tokenizer's vocabulary, or with one that cannot end an answer."""
    from engine.grammar import GrammarCompiler
    from engine.vocabulary import Vocabulary

    size = min(start.vocab_limit, model.vocab_size)
    eos_token_ids = _ends(start, model, size)
    if not start.tokens or not eos_token_ids:
        return None
    special_ids = tuple(index for index in start.special_ids if index < size)
    return GrammarCompiler(Vocabulary(start.tokens[:size], special_ids, eos_token_ids))


@dataclass(frozen=True, slots=True)
class Built:
    """An engine that is not warm yet, the form of its weights and lines for people."""

    engine: StepEngine | TorchEngine
    weights: str
    notes: tuple[str, ...]
    num_threads: int
    grammars: GrammarCompiler | None
    kernel_seconds: Callable[[], dict[str, float]] | None = None


def _choose_kernels(
    config: EngineConfig, device: str, model: ModelConfig
) -> tuple[str, str | None]:
    """The fastest that can be, if nothing else was asked for, and why no faster ones.

    Raises ModelFileError.
    """
    from engine.native_cpu import refusal

    native_only, gpu_only = _native_only(config), _gpu_only(config)
    if gpu_only is not None and (device != "cuda" or not find_spec("triton")):
        raise ModelFileError(f"{gpu_only} needs a CUDA device and the triton package")
    if device == "cuda" and native_only is None:
        return ("triton" if find_spec("triton") else "torch"), None
    if config.cpu_kernels == "reference" or device != "cpu":
        if native_only is not None:
            raise ModelFileError(f"{native_only} needs the native kernels, on a CPU")
        return "torch", None
    reason = refusal(model)
    if reason is None and config.block_size % 16:
        reason = f"--block-size {config.block_size} is no multiple of 16"
    if reason is None and config.dtype not in ("auto", "float32"):
        reason = f"--dtype {config.dtype} is for the reference kernels on a CPU"
    if reason is None:
        return "native", None
    if config.cpu_kernels == "native":
        raise ModelFileError(f"--cpu-kernels native: {reason}")
    if native_only is not None:
        raise ModelFileError(f"{native_only}: {reason}")
    return "torch", reason


def _native_only(config: EngineConfig) -> str | None:
    """What was asked for that the native CPU kernels alone can do."""
    if config.cpu_quantize != "none":
        return f"--cpu-quantize {config.cpu_quantize}"
    return f"--kv-dtype {config.kv_dtype}" if config.kv_dtype in ("int8", "int16") else None


def _gpu_only(config: EngineConfig) -> str | None:
    """What was asked for that the Triton kernels alone can do."""
    if config.gpu_quantize != "none":
        return f"--gpu-quantize {config.gpu_quantize}"
    return None if config.kv_dtype != "fp8" else f"--kv-dtype {config.kv_dtype}"


def _pack(config: EngineConfig, limits: SchedulerLimits, files: ModelFiles) -> Packed:
    """Quantised weights stay as they are in the file; KV has 8 bits beside them, else 16."""
    import numpy as np

    from engine.cpu_count import usable_cores
    from engine.kv_memory import IntegerKV
    from engine.native_cpu import NativeOptions
    from engine.native_runner import load_native, native_file

    file = native_file(files, quantise=config.cpu_quantize == "int8")
    kv_type = config.kv_dtype
    if kv_type == "auto" and config.dtype == "float32":
        kv_type = "float32"
    elif kv_type == "auto":
        kv_type = "int8" if file.weights.quantised else "int16"
    element = np.dtype(kv_type)
    sizes = element if kv_type == "float32" else IntegerKV(element.itemsize)
    for warning in file.warnings:
        log.warning("%s", warning)
    capacity, formula = size_cache(file.config, config, limits, "cpu", sizes)
    options = NativeOptions(
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        max_model_len=capacity.max_model_len,
        max_step_tokens=max(limits.max_step_tokens, capacity.num_slots),
        num_threads=config.threads or usable_cores(),
        kv_type=kv_type,
    )
    form = "quantised" if file.weights.quantised else file.config.checkpoint_dtype
    runner = load_native(file, options)
    return Packed(config, limits, file.config, runner, capacity, form, formula, options.num_threads)


def _build_native(start: Start, packed: Packed) -> Built:
    from engine.native_runner import native_engine

    grammars = _grammars(start, packed.model)
    engine = native_engine(
        packed.runner, capacity=packed.capacity, vocab_limit=start.vocab_limit, grammars=grammars
    )
    return Built(
        engine,
        packed.weights,
        (packed.formula,),
        packed.num_threads,
        grammars,
        packed.runner.kernel_seconds,
    )


def _build_torch(start: Start, files: ModelFiles, device: str, report: Report) -> Built:
    import torch

    from engine.cpu_count import usable_cores
    from engine.torch_engine import TorchEngine

    threads = start.config.threads or min(torch.get_num_threads(), usable_cores())
    torch.set_num_threads(threads)
    loaded, dtype = _load_weights(start, files, device, report)
    model = files.config
    capacity, formula = size_cache(model, start.config, start.limits, device, dtype)
    grammars = _grammars(start, model)
    engine = TorchEngine(
        loaded,
        device=torch.device(device),
        dtype=dtype,
        capacity=capacity,
        vocab_limit=start.vocab_limit,
        grammars=grammars,
    )
    return Built(engine, _form(dtype), (formula,), threads, grammars)


def _build_cuda(start: Start, files: ModelFiles, device: str, report: Report) -> Built:
    """Fused kernels and graphs; without --kv-memory a trial step finds what fits to the block."""
    import torch

    from engine.cuda_engine import Limits, make_cuda_engine, make_sized_cuda_engine, prepare
    from engine.gpu_linear import describe_weights
    from engine.kv_memory import describe

    config, model = start.config, files.config
    dtype = _choose_dtype(config.dtype, device, model)
    forms = {"quantise": config.gpu_quantize, "deterministic": config.deterministic}
    try:
        prepared = prepare(model, dtype, device, kv_dtype=config.kv_dtype, **forms)
    except ValueError as error:
        raise ModelFileError(str(error)) from None
    loaded, _ = _load_weights(start, files, device, report, prepared.change)
    kv_scales = prepared.finish(loaded.decoder)
    kv_dtype = prepared.kv_dtype
    capacity, formula = size_cache(model, config, start.limits, device, kv_dtype)
    grammars = _grammars(start, model)
    options: dict[str, Any] = {
        "device": torch.device(device),
        "dtype": kv_dtype,
        "vocab_limit": start.vocab_limit,
        "grammars": grammars,
        "deterministic": config.deterministic,
        "kv_scales": kv_scales,
    }
    form = _form(dtype)
    if config.gpu_quantize != "none":
        form = f"{form}, products {config.gpu_quantize}"
    weights = describe_weights(loaded.decoder)
    if config.kv_memory is not None:
        engine = make_cuda_engine(loaded, capacity=capacity, **options)
        return Built(engine, form, (weights, formula), 0, grammars)
    limits = Limits(
        block_size=config.block_size,
        num_slots=start.limits.max_running,
        max_model_len=capacity.max_model_len,
        max_step_tokens=max(start.limits.max_step_tokens, start.limits.max_running),
    )
    try:
        engine, plan = make_sized_cuda_engine(loaded, limits, **options)
    except ValueError as error:
        raise ModelFileError(str(error)) from None
    blocks = engine.capacity.num_blocks
    formula = describe(model, kv_dtype, num_blocks=blocks, block_size=config.block_size)
    return Built(engine, form, (weights, formula, plan.describe()), 0, grammars)


def _load_weights(
    start: Start,
    files: ModelFiles,
    device: str,
    report: Report,
    change: LayerChange | None = None,
) -> tuple[LoadedModel, torch.dtype]:
    import torch

    from engine.loading import load_weights

    dtype = _choose_dtype(start.config.dtype, device, files.config)
    loaded = load_weights(
        files,
        dtype=dtype,
        device=torch.device(device),
        progress=lambda done, total: report("loading weights", done, total),
        max_model_len=start.config.max_model_len,
        change=change,
    )
    for warning in loaded.warnings:
        log.warning("%s", warning)
    report("making the KV cache", 0, 0)
    return loaded, dtype


def _form(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _choose_device(name: str) -> str:
    """cpu or cuda."""
    if name == "cpu" or (name == "auto" and not _may_have_cuda()):
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise ModelFileError("--device cuda: there is no CUDA device that torch can use")
    return "cpu"


def _choose_dtype(name: str, device: str, model: ModelConfig) -> torch.dtype:
    """auto: float32 on a CPU; on a GPU the checkpoint's type, bfloat16 for float32 or quantised."""
    import torch

    if name == "auto" and device == "cpu":
        name = "float32"
    elif name == "auto":
        stored = model.checkpoint_dtype
        name = stored if stored in ("float16", "bfloat16") else "bfloat16"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _device_name(device: str, num_threads: int) -> str:
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    return f"cpu ({num_threads} threads)"
