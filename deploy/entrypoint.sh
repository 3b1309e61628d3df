#!/bin/sh
# The entry point of a container: starts the trainer, which resumes from the last snapshot if there is one.
#
#     entrypoint.sh [train|finetune] FLAGS…     trains into $RUN_DIR, and resumes there when started again
#     entrypoint.sh generate|chat|… FLAGS…      any other program of the image
#
# Variables:
#     RUN_DIR          the folder of the run and its snapshots                            [/runs/run]
#     NPROC            processes in this container, one a GPU                             [1]
#     OMP_NUM_THREADS  threads of an operator                                             [the CPU limit]
#     LIBTORCH_DIR     the folder `lib` of another libtorch, as torch/lib of a PyTorch with CUDA
#     RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT   the rank of this process among several nodes, read by the trainer
# The trainer replaces this script, so that signals reach it. It exits with 0 when the run is finished, and with 75
# after a signal when everything is saved: start it again later. Any other code is a failure, including 130: after a
# signal, the last step could not be saved.
set -eu

fail() {
    echo "entrypoint: $1" >&2
    exit 2
}

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
PATH=$here:$PATH

case ${1:-} in
    '' | -*) program=train ;;
    *) program=$1 && shift ;;
esac
[ -x "$here/$program" ] || fail "there is no program $program in $here"

if [ -n "${LIBTORCH_DIR:-}" ]; then
    [ -f "$LIBTORCH_DIR/libtorch_cpu.so" ] || fail "LIBTORCH_DIR=$LIBTORCH_DIR contains no libtorch_cpu.so"
    export LD_LIBRARY_PATH="$LIBTORCH_DIR${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

# The container's CPU limit, in microseconds of each period; `max` or -1 if there is none.
cpu_limit() {
    read -r quota period </sys/fs/cgroup/cpu.max && return
    # Version 1 of control groups.
    read -r quota </sys/fs/cgroup/cpu/cpu.cfs_quota_us && read -r period </sys/fs/cgroup/cpu/cpu.cfs_period_us
}

# libtorch starts one thread per core of the machine, even if the container may use only four of ninety-six.
if [ -z "${OMP_NUM_THREADS:-}" ] && cpu_limit 2>/dev/null; then
    if [ "$quota" != max ] && [ "$quota" != -1 ]; then
        cores=$(((quota + period - 1) / period))
        export OMP_NUM_THREADS=$((cores / ${NPROC:-1} > 0 ? cores / ${NPROC:-1} : 1))
    fi
fi

case $program in
    train | finetune) ;;
    *) exec "$here/$program" "$@" ;;
esac

# Given flags take precedence over those of this script.
out=--out resume=--resume-from-checkpoint
for argument in "$@"; do
    case $argument in
        --help | -h) exec "$here/$program" --help ;;
        --out | --out=* | --output-dir | --output-dir=*) out= ;;
        --resume-from-checkpoint | --resume-from-checkpoint=*) resume= ;;
    esac
done
if [ -n "$out" ]; then
    run=${RUN_DIR:-/runs/run}
    # The trainer would report this too, but only after preparing the data.
    mkdir -p "$run" 2>/dev/null && [ -w "$run" ] ||
        fail "the folder $run cannot be written by user $(id -u): mount a volume there, or set RUN_DIR"
    set -- "$@" "$out" "$run"
fi
[ -z "$resume" ] || set -- "$@" "$resume" true

if [ "${NPROC:-1}" -gt 1 ]; then
    [ "${WORLD_SIZE:-1}" -le 1 ] ||
        fail "NPROC=$NPROC and WORLD_SIZE=$WORLD_SIZE: with several nodes, start one container per process"
    # The container engine decides how long the processes have to save: it ends everything after its own grace period.
    exec "$here/launch" --nproc "$NPROC" --stop-grace 3600 "$program" "$@"
fi
exec "$here/$program" "$@"
