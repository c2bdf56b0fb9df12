#!/usr/bin/env bash
# The whole job under torchrun on this machine: as many ranks as the config asks for.
#
#     scripts/torchrun_one_node.sh CONFIG [key=value ...]
#
# A rank that dies restarts all of them from the newest checkpoint, RESTARTS times (default 3). SIGTERM, SIGINT and
# SIGUSR1 make the student save and stop (exit code 75); run the same command again to go on. Bare `disaggkd run` does
# the same without torchrun, and restarts a dead teacher without the student. See docs/launch.md.
set -euo pipefail
DISAGGKD_HOME=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export DISAGGKD_HOME
source "$DISAGGKD_HOME/scripts/slurm/functions.sh"
source "$DISAGGKD_HOME/scripts/torchrun_functions.sh"

read_arguments "$@"
ranks=$(count_ranks)
torchrun_options
run_step "$STOP_SIGNAL" "$PYTHON" -m torch.distributed.run --standalone "--nproc-per-node=$ranks" \
    "--max-restarts=${RESTARTS:-3}" "${TORCHRUN_OPTIONS[@]}" \
    -m disaggkd_cli run "$CONFIG" "${OVERRIDES[@]}" "run_dir=$RUN_DIR" --resume auto
finish
