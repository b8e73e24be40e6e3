#!/usr/bin/env bash
# Measures the GPU path on the machine at hand, in under six minutes; the result is one JSON file.
#   bench/gpu_check.sh [--dry-run] [--seconds N] [--out FILE]
# Needs Python with torch and triton, and this repository. --dry-run needs no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m tests.gpu.check "$@"
