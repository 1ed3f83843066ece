#!/usr/bin/env bash
# Dynamic verification on the bundled model: many requests share a fixed budget of rows per step,
# and the drafters' confidences say whose drafts get them. Runs on every device that the environment
# exposes, or on the CPU where there is none, and fails if a token differs from plain decoding. Where
# FlashAttention-3 can be used, once more with it, where near-ties are counted.
#
#   scripts/dynamic_verify.sh [--requests N] [--verify-rows N] [--draft-tokens K] [--max-tokens N]
#
# PYTHON chooses the interpreter; otherwise .venv's, if it exists, or python3.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
    python=.venv/bin/python
fi
devices=$("$python" -c '
import torch
print("\n".join(f"cuda:{i}" for i in range(torch.cuda.device_count())) or "cpu")
')
for device in $devices; do
    "$python" benchmarks/dynamic_verify.py --device "$device" "$@"
    if "$python" -c '
import sys
import torch
from hybridspec.ops.paged_attention import fa3
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(sys.argv[1]) == (9, 0)
sys.exit(isinstance(fa3.installed_build(), str) or not is_hopper)
' "$device"; then
        "$python" benchmarks/dynamic_verify.py --device "$device" --attention-backend fa3 "$@"
    fi
done
