#!/usr/bin/env bash
# Checks disaggkd on a machine with GPUs, without network: the GPU tests, the benches, and one pair distilled
# disaggregated (two processes on the one GPU) and colocated, in ten minutes on one GPU; links over NCCL with a teacher
# killed, on two; FSDP beside many links and a soak, on eight. What is most likely to fail comes first. Prints each
# step's figure beside the predicted one and a verdict on its claim; writes gpu_checks.json to $OUT or ./gpu_checks.
# Exit code 1 when anything failed or could not be run.
#
#     scripts/gpu_checks.sh                          # python from $PYTHON or python3; nothing need be installed
#     scripts/gpu_checks.sh --part two --part eight  # one or more parts; all that the machine has GPUs for
#     scripts/gpu_checks.sh --what-would-run         # every step, its claim, the figure expected; needs no GPU
#     scripts/gpu_checks.sh --device cpu --small     # the same lines on a CPU, in under three minutes
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "gpu_checks: PYTHON=$python: is no program" >&2; exit 2; }
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$root/scripts/gpu_checks.py" "$@"
