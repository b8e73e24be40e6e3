#!/bin/sh
# Builds the CPU kernels with the address and undefined-behaviour sanitizers and runs tests on them.
#   sanitize.sh FOLDER TIERS [pytest arguments]      from the root of the repository
# FOLDER takes the libraries; TIERS is a list such as "generic avx2". $PYTHON and $CXX are honoured.
set -e
folder=$1 tiers=$2
shift 2
python=${PYTHON:-python3}
# shellcheck disable=SC2086
"$python" engine/kernels/cpu/build.py --sanitize "$folder" $tiers
runtime=$(${CXX:-c++} -print-file-name=libasan.so):$(${CXX:-c++} -print-file-name=libubsan.so)
# Leaks are not looked for: the interpreter keeps memory until it ends.
ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$runtime PACELINE_CPU_FOLDER=$folder \
  exec "$python" -m pytest -p no:faulthandler -q "$@"
