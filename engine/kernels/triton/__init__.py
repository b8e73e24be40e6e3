"""Kernels for CUDA devices in Triton, each with its launcher; nothing here runs at import.

Only the cuda path imports these modules (engine.attention.triton, engine.cuda_runner and what they
use): they need the `triton` package, which a machine without a GPU does not have to have.
"""
