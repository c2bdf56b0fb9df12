#!/usr/bin/env bash
# Submits the student and its teachers as jobs of their own, with one run_dir.
#
#     STUDENT_OPTIONS="--partition=h100 --nodes=2" TEACHER_OPTIONS="--partition=a100" TEACHER_JOBS=4 \
#         scripts/slurm/submit_two_jobs.sh CONFIG [key=value ...]
#
# TEACHER_JOBS jobs of teachers are an array. The options are split at spaces. See docs/launch.md.
set -euo pipefail
DISAGGKD_HOME=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export DISAGGKD_HOME
source "$DISAGGKD_HOME/scripts/slurm/functions.sh"

read_arguments "$@"
read -r -a student_options <<<"${STUDENT_OPTIONS:-}"
read -r -a teacher_options <<<"${TEACHER_OPTIONS:-}"
last=$((${TEACHER_JOBS:-1} - 1))
[ "$last" -ge 0 ] || die "TEACHER_JOBS=${TEACHER_JOBS:-}: must be at least 1"
arguments=("$CONFIG" "${OVERRIDES[@]}" "run_dir=$RUN_DIR")
folder=$DISAGGKD_HOME/scripts/slurm
student=$(sbatch --parsable "${student_options[@]}" "$folder/student.sbatch" "${arguments[@]}")
teacher_options=(--parsable "--array=0-$last" "${teacher_options[@]}")
if ! teachers=$(sbatch "${teacher_options[@]}" "$folder/teachers.sbatch" "${arguments[@]}"); then
    scancel "$student" || say "could not cancel the student's job $student"
    die "the teachers' job was not accepted, so the student's job $student was cancelled; correct TEACHER_OPTIONS"
fi
say "student: job $student; teachers: job $teachers (0-$last); run_dir $RUN_DIR"
