#!/bin/sh
# Builds the image and runs it, on a Linux machine with access to Debian's packages but no image registry. As root:
#
#     apt-get install buildah runc debootstrap && deploy/image.sh
# - builds the two base images from Debian's packages and this machine's Rust, unless they exist
# - builds our image, then again after a change to Rust code, which may rebuild only the last layer
# - starts it with runc and its own configuration, with a read-only root, no capabilities, no network, one CPU and
#   2 GiB; preempts it by SIGTERM, starts it again, and generates a text with its model
# It takes 20 minutes on two cores, and half of that if the layers are in buildah's cache. Exits with 1 if anything
# fails.
set -eu

deploy=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
repository=$(dirname "$deploy")
image=localhost/overdrive
slim=docker.io/library/debian:bookworm-slim
rust=docker.io/library/rust:1.95-bookworm
export BUILDAH_ISOLATION=chroot

work=$(mktemp -d "${TMPDIR:-/tmp}/overdrive-image.XXXXXX")
containers=
trap 'runc delete --force overdrive-check 2>/dev/null
    for container in $containers; do buildah rm "$container" >/dev/null; done
    rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

failed=0
pass() { echo "  ok    $1"; }
expect() { # WHAT GOT WANTED
    if [ "$2" = "$3" ]; then pass "$1: $2"; else
        echo "  FAIL  $1: $2, and $3 was expected"
        failed=1
    fi
}
have() { buildah inspect --type image "$1" >/dev/null 2>&1; }
begin() { # IMAGE: a container of it, in $container
    container=$(buildah from --pull-never "$1")
    containers="$containers $container"
}

# --- The base images.
if ! have "$slim"; then
    echo "$slim, of Debian's packages"
    debootstrap --variant=minbase bookworm "$work/slim" >"$work/log"
    begin scratch
    buildah add --quiet "$container" "$work/slim" / >/dev/null
    # The certificates that this machine trusts.
    buildah add --quiet "$container" /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ >/dev/null
    buildah commit --quiet "$container" "$slim" >/dev/null
    rm -rf "$work/slim"
fi
if ! have "$rust"; then
    echo "$rust, of that and of $(rustc --version)"
    begin "$slim"
    buildah run "$container" -- sh -c 'apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes \
        --no-install-recommends g++ make pkg-config ca-certificates' >"$work/log" 2>&1
    buildah add --quiet "$container" "$(rustc --print sysroot)" /usr/local/rustup >/dev/null
    buildah add --quiet "$container" /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ >/dev/null
    buildah config --env CARGO_HOME=/usr/local/cargo --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
        --env PATH=/usr/local/rustup/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    buildah commit --quiet "$container" "$rust" >/dev/null
fi

# --- The image.
mkdir "$work/source"
git -C "$repository" ls-files -z | (cd "$repository" && xargs -0 cp --parents --target-directory "$work/source")
cd "$work/source"
build() { # NAME TAG
    buildah bud --pull-never --layers --file deploy/Containerfile --tag "$2" . >"$work/$1.log" 2>&1 || {
        tail -n 30 "$work/$1.log"
        exit 1
    }
}
echo "the image"
build first "$image"
pass "built: $(buildah images --format '{{.Size}}' "$image")"
# Different in each run, so that the layers of the last run are not reused.
echo "// $(date)" >>examples/train.rs
build again "$image:changed"
# The steps of the compiling stage that no cache had.
anew=$(awk '/ STEP / { step = $0 } /^\[3\/4\] STEP .*(RUN|COPY|FROM|ARG|ENV)/ { open[step] = 1 }
    /Using cache/ { delete open[step] } END { for (step in open) print step }' "$work/again.log" |
    sed -n 's/.*STEP \([0-9]*\)\/.*: \(COPY\|RUN\).*/\1/p' | sort -n | tr '\n' ' ')
last=$(sed -n 's/^\[3\/4\] STEP [0-9]*\/\([0-9]*\): RUN.*/\1/p' "$work/again.log" | tail -n 1)
expect "steps made anew after a change to Rust code" "$anew" "$((last - 1)) $last "

# --- A container of it.
echo "a container of it, by runc"
begin "$image"
root=$(buildah mount "$container")
mkdir "$work/runs" "$work/cache"
chown 10001:10001 "$work/runs" "$work/cache"
chmod 755 "$work"
# The image's configuration in the format of the OCI runtime specification.
configure() { # ARGUMENTS…
    python3 - "$image" "$root" "$repository/crates" "$work" "$@" >"$work/config.json" <<'PYTHON'
import json, subprocess, sys

image, root, data, work, *arguments = sys.argv[1:]
described = json.loads(subprocess.check_output(["buildah", "inspect", "--type", "image", image]))
config = described["OCIv1"]["config"]
uid, gid = map(int, config["User"].split(":"))


def bind(source, destination, mode):
    return {"type": "bind", "source": source, "destination": destination, "options": ["rbind", mode]}


def mount(kind, destination, *options):
    return {"type": kind, "source": kind, "destination": destination, "options": list(options)}


print(json.dumps({
    "ociVersion": "1.0.0",
    "root": {"path": root, "readonly": True},
    "hostname": "train-0",
    "process": {
        "user": {"uid": uid, "gid": gid},
        "args": config["Entrypoint"] + arguments,
        "env": config["Env"],
        "cwd": config["WorkingDir"],
        "capabilities": {},
        "noNewPrivileges": True,
    },
    "mounts": [
        mount("proc", "/proc"),
        mount("tmpfs", "/dev", "mode=755"),
        mount("tmpfs", "/tmp", "mode=1777"),
        mount("sysfs", "/sys", "ro"),
        mount("cgroup", "/sys/fs/cgroup", "ro"),
        bind(data, "/data", "ro"),
        bind(work + "/runs", "/runs", "rw"),
        bind(work + "/cache", "/cache", "rw"),
    ],
    "linux": {
        "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network", "cgroup")],
        "resources": {"cpu": {"quota": 100000, "period": 100000}, "memory": {"limit": 2 << 30}},
    },
}))
PYTHON
}
run() { # LOG: in the background
    runc run --bundle "$work" overdrive-check >"$work/$1.log" 2>&1 &
    pid=$!
}
ended() { # in $code
    code=0
    wait "$pid" || code=$?
}
steps() { cat "$work/runs/run/metrics.jsonl" 2>/dev/null | wc -l; }

# shellcheck disable=SC2086 # the flags are words
train() {
    configure --data=/data --steps=40 --save-steps=15 --context-length=64 --vocab-size=512 --micro-batch-size=4 \
        --gradient-accumulation-steps=1 --eval-steps=0 --samples=0
    run "$1"
}
train first
while [ "$(steps)" -lt 20 ] && kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
first=$(runc state overdrive-check | sed -n 's/^ *"pid": \([0-9]*\),$/\1/p')
threads=$(tr '\0' '\n' <"/proc/$first/environ" | sed -n 's/^OMP_NUM_THREADS=//p')
runc kill overdrive-check TERM
ended
expect "threads, of one CPU" "$threads" 1
expect "SIGTERM in mid-run: exit code" "$code" 75
taken=$(steps)
train again
ended
expect "started again after $taken of 40 steps: exit code" "$code" 0
expect "it resumes after step" "$(sed -n 's/^goes on *after .*checkpoint-//p' "$work/again.log")" "$taken"
expect "lines of metrics.jsonl" "$(steps)" 40
expect "owner of the model" "$(stat -c %u "$work/runs/run/model/model.safetensors")" 10001
configure generate --model /runs/run/model --prompt 'fn main' --max-new-tokens 8
run generate
ended
expect "generate: exit code" "$code" 0
[ "$failed" = 0 ] || tail -n 20 "$work"/first.log "$work"/again.log "$work"/generate.log
exit "$failed"
