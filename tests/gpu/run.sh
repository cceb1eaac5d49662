#!/bin/sh
# Paged KV on a CUDA device through the NVMe tier and back, bit for bit, and its rates: torch and LMCache are enough.
#
#   tests/gpu/run.sh [--directory DIR on the drive] [--json FILE] [--gib N]
#
# PYTHON names the interpreter; else the environment of `make`, else python3. Without a CUDA device it says so and ends
# with 0.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x "$root/.venv/bin/python" ] && PYTHON="$root/.venv/bin/python"
fi
PYTHONHASHSEED=0 LMCACHE_TRACK_USAGE=false LMCACHE_LOG_LEVEL="${LMCACHE_LOG_LEVEL:-ERROR}" \
    PYTHONPATH="$root:$root/configs:$root/patches${PYTHONPATH:+:$PYTHONPATH}" \
    exec "$PYTHON" "$root/tests/gpu/drive.py" "$@"
