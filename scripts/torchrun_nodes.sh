#!/usr/bin/env bash
# The whole job under torchrun on several machines: start this on each of them, with the same arguments.
#
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 scripts/torchrun_nodes.sh CONFIG [key=value ...]     # on node0
#     NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 scripts/torchrun_nodes.sh CONFIG [key=value ...]     # on the other
#
# or once under SLURM, which supplies all of them:
#
#     srun --nodes=2 --ntasks-per-node=1 scripts/torchrun_nodes.sh CONFIG [key=value ...]
#
# The ranks are divided evenly over the nodes (or set NPROC_PER_NODE); node 0 holds the first ones, the student's. A
# rank that dies ends the job on all nodes; the same command goes on from the newest checkpoint. See docs/launch.md.
set -euo pipefail
DISAGGKD_HOME=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export DISAGGKD_HOME
source "$DISAGGKD_HOME/scripts/slurm/functions.sh"
source "$DISAGGKD_HOME/scripts/torchrun_functions.sh"

read_arguments "$@"
nodes=${NNODES:-${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-}}}
node=${NODE_RANK:-${SLURM_NODEID:-}}
[ -n "$nodes" ] && [ -n "$node" ] || die "set NNODES and NODE_RANK (0 to NNODES - 1), or start under srun"
[ "$node" -lt "$nodes" ] || die "NODE_RANK=$node: must be below NNODES=$nodes"
if [ -z "${MASTER_ADDR:-}" ]; then
    list=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}
    [ -n "$list" ] || die "set MASTER_ADDR to the first node's name or address"
    first='import sys; from disaggkd_cli.nodelist import expand_hosts; print(expand_hosts(sys.argv[1])[0])'
    MASTER_ADDR=$("$PYTHON" -c "$first" "$list")
fi
port=${MASTER_PORT:-$((15000 + ${SLURM_JOB_ID:-14500} % 15000))}
ranks=$(count_ranks)
per_node=${NPROC_PER_NODE:-$((ranks / nodes))}
[ "$((per_node * nodes))" = "$ranks" ] || die "the config needs $ranks ranks, which $nodes nodes x $per_node do not \
make; change student.ranks, teacher.replicas, NNODES or NPROC_PER_NODE"
torchrun_options
# torchrun forms the world from these two; the ranks take theirs from it.
unset SLURM_PROCID
run_step "$STOP_SIGNAL" "$PYTHON" -m torch.distributed.run "--nnodes=$nodes" "--node-rank=$node" \
    "--nproc-per-node=$per_node" "--master-addr=$MASTER_ADDR" "--master-port=$port" --max-restarts=0 \
    "${TORCHRUN_OPTIONS[@]}" \
    -m disaggkd_cli run "$CONFIG" "launch.bind=${BIND:-all}" "${OVERRIDES[@]}" "run_dir=$RUN_DIR" --resume auto
# Only node 0 holds the rank that writes how the run ended; under srun it alone answers for the job.
if [ "$node" != 0 ]; then exit "$CODE"; fi
SLURM_JOB_ID='' finish
