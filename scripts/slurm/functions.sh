# Functions of the launch scripts; to be sourced, not run. docs/launch.md explains the variables that they read:
# PYTHON, RUN_DIR, BIND, MAX_REQUEUES, SAVE_SECONDS, STUDENT_PATIENCE, RENDEZVOUS_HOST, RENDEZVOUS_PORT.
# shellcheck shell=bash

say() { printf '%s: %s\n' "${SLURM_JOB_NAME:-disaggkd}" "$*" >&2; }
die() { say "$*"; exit 2; }

# read_arguments CONFIG [key=value ...]: sets CONFIG, OVERRIDES, RUN_DIR, PYTHON, and what every rank inherits.
read_arguments() {
    [ "$#" -ge 1 ] || die "give the config: SCRIPT CONFIG [key=value ...]"
    CONFIG=$1
    shift
    OVERRIDES=("$@")
    [ -f "$CONFIG" ] || die "$CONFIG: is no file; give the path of the config, seen from $PWD"
    PYTHON=${PYTHON:-python3}
    command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON: is no program; set PYTHON to the python that has disaggkd"
    local override
    for override in "${OVERRIDES[@]}"; do
        case $override in
            run_dir=*) RUN_DIR=${override#run_dir=} ;;
            *=*) ;;
            *) die "$override: is no override; they look like train.steps=20" ;;
        esac
    done
    RUN_DIR=${RUN_DIR:-runs/${SLURM_JOB_NAME:-disaggkd}}
    # The checkout is enough; an installed package is found just as well.
    export PYTHONPATH=$DISAGGKD_HOME${PYTHONPATH:+:$PYTHONPATH}
    # Since SLURM 22.05 srun no longer takes this from sbatch by itself.
    if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
    # In the run's own folder, so that one clock stamps all files that are compared.
    mkdir -p "$RUN_DIR"
    STARTED_MARK=$(mktemp "$RUN_DIR/.started.XXXXXX")
    trap 'rm -f "$STARTED_MARK"' EXIT
    REQUEUE_WISH=0
    STEP=''
}

# count_ranks: prints how many ranks `run` needs, student's and teachers' together.
count_ranks() {
    "$PYTHON" - "$CONFIG" "${OVERRIDES[@]}" <<'PY'
import sys
from disaggkd_cli.config import load
from disaggkd_cli.errors import DisaggkdError
try:
    config = load(sys.argv[1], sys.argv[2:])
except DisaggkdError as error:
    sys.exit(f"disaggkd: {error}")
print(config.student.ranks + config.teacher_ranks)
PY
}

# status_field NAME [any]: prints a field of the status.json that this start has written (or any start); else nothing.
status_field() {
    if [ "${2:-}" = any ]; then
        [ -f "$RUN_DIR/status.json" ] || return 0
    else
        [ "$RUN_DIR/status.json" -nt "$STARTED_MARK" ] || return 0
    fi
    "$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$RUN_DIR/status.json" "$1"
}

# run_step SIGNAL COMMAND ...: runs COMMAND to its end and sets CODE. A signal that means "time is up" is passed on as
# SIGNAL, and remembered in REQUEUE_WISH.
run_step() {
    local forward=$1 interrupted
    shift
    trap 'interrupted=1; REQUEUE_WISH=1; kill -s "$forward" "$STEP" 2>/dev/null || true' USR1 TERM INT
    "$@" &
    STEP=$!
    while :; do
        interrupted=0
        CODE=0
        wait "$STEP" || CODE=$?
        # A trapped signal ends `wait`, not the command: wait for that again.
        [ "$interrupted" = 1 ] || break
    done
    trap - USR1 TERM INT
    STEP=''
}

# finish: ends this script as the run ended, and asks SLURM for another turn where the run saved and can go on.
finish() {
    local state exit_code reason
    state=$(status_field state)
    exit_code=$(status_field exit_code)
    reason=$(status_field reason)
    if [ "$state" = finished ]; then
        say "finished: $RUN_DIR/student"
        exit 0
    fi
    if [ "$state" = stopped ] && [ "$exit_code" = 75 ]; then
        requeue
        exit 75
    fi
    if [ "$state" = failed ]; then
        say "failed: $reason"
        exit "$exit_code"
    fi
    say "ended with exit code $CODE before the student could say why; the lines above tell"
    exit "$((CODE == 0 ? 1 : CODE))"
}

# requeue: puts this SLURM job back into the queue, at most MAX_REQUEUES times.
requeue() {
    [ -n "${SLURM_JOB_ID:-}" ] || return 0
    local most=${MAX_REQUEUES:-100}
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$most" ]; then
        say "not requeued: this job had its $most turns already (MAX_REQUEUES)"
        return 0
    fi
    say "asking SLURM for another turn"
    scontrol requeue "$SLURM_JOB_ID" || say "scontrol could not requeue the job; submit it again, it goes on"
}

# publish_rendezvous: sets ENDPOINT to where this job's student will listen, and tells it to the teachers' jobs.
publish_rendezvous() {
    # The batch script runs on the job's first node, where student rank 0 runs too.
    local host=${RENDEZVOUS_HOST:-${SLURMD_NODENAME:-$(hostname)}}
    ENDPOINT=$host:${RENDEZVOUS_PORT:-$((15000 + SLURM_JOB_ID % 15000))}
    printf '%s\n' "$ENDPOINT" >"$RUN_DIR/.rendezvous.$SLURM_JOB_ID"
    mv "$RUN_DIR/.rendezvous.$SLURM_JOB_ID" "$RUN_DIR/rendezvous"
    trap 'rm -f "$STARTED_MARK" "$RUN_DIR/rendezvous"' EXIT
}
