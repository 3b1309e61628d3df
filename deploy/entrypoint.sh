#!/bin/sh
# What a container starts: the trainer, going on after the last snapshot where there is one.
#
#     entrypoint.sh [train|finetune] FLAGS…     trains into $RUN_DIR, and goes on there when started again
#     entrypoint.sh generate|chat|… FLAGS…      any other program of the image, as it is
#
# Variables:
#     RUN_DIR          the folder of the run and its snapshots                            [/runs/run]
#     NPROC            processes in this container, one a GPU                             [1]
#     OMP_NUM_THREADS  threads of an operator                                             [the CPU limit]
#     LIBTORCH_DIR     the folder `lib` of another libtorch, as torch/lib of a PyTorch with CUDA
#     RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT   this process's place among several nodes, read by the trainer
#
# The trainer takes the place of this script, so that signals reach it. It ends with 0 when the run is over, and
# with 75 when a signal came and everything is saved: start it again later. Anything else is a failure, also 130: a
# signal came, and the last step could not be saved.
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
    [ -f "$LIBTORCH_DIR/libtorch_cpu.so" ] || fail "LIBTORCH_DIR=$LIBTORCH_DIR holds no libtorch_cpu.so"
    export LD_LIBRARY_PATH="$LIBTORCH_DIR${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

# The container's CPU limit, in microseconds of each period; `max` or -1 where there is none.
cpu_limit() {
    read -r quota period </sys/fs/cgroup/cpu.max && return
    # Of the first version of control groups.
    read -r quota </sys/fs/cgroup/cpu/cpu.cfs_quota_us && read -r period </sys/fs/cgroup/cpu/cpu.cfs_period_us
}

# libtorch takes one thread a core of the machine, also where the container may use four of its ninety-six.
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

# Flags that were given stand over those of this script.
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
    # The trainer would say so too, after it has prepared the data.
    mkdir -p "$run" 2>/dev/null && [ -w "$run" ] ||
        fail "the folder $run cannot be written by user $(id -u): mount a volume there, or set RUN_DIR"
    set -- "$@" "$out" "$run"
fi
[ -z "$resume" ] || set -- "$@" "$resume" true

if [ "${NPROC:-1}" -gt 1 ]; then
    [ "${WORLD_SIZE:-1}" -le 1 ] ||
        fail "NPROC=$NPROC and WORLD_SIZE=$WORLD_SIZE: with several nodes, start one container a process"
    # How long they have to save is the container engine's to say, which ends everything after its own grace.
    exec "$here/launch" --nproc "$NPROC" --stop-grace 3600 "$program" "$@"
fi
exec "$here/$program" "$@"
