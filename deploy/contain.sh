#!/bin/sh
# Starts the entry script as a container would, on a Linux machine without a container engine: as process 1 of
# its own namespaces, in its own read-only root, as user 10001 without capabilities and with an empty environment.
# It sees only /usr of the machine. Needs root.
#
#     deploy/contain.sh DIST DATA RUNS CACHE HOST [VARIABLE=VALUE…] -- ARGUMENTS…
#
# DIST is a folder of `cargo xtask dist`; RUNS and CACHE must be writable by user 10001. It does not imitate an
# image's own /usr, limits of memory and CPU, or a separate network.
set -eu

if [ "${1:-}" != --inside ]; then
    root=$(mktemp -d "${TMPDIR:-/tmp}/overdrive-root.XXXXXX")
    # The folder is empty again once the namespace is gone, because its mounts go with it.
    trap 'rmdir "$root"' EXIT
    deploy=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
    # The script waits; a signal to process 1 is sent by its number, as a container engine does.
    code=0
    unshare --mount --pid --uts --fork --kill-child=KILL \
        "$deploy/contain.sh" --inside "$root" "$deploy" "$@" || code=$?
    exit "$code"
fi

root=$2 deploy=$3 dist=$4 data=$5 runs=$6 cache=$7 host=$8
shift 8
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$root"

bind() { # FROM TO OPTION
    if [ -d "$1" ]; then
        mkdir -p "$root$2"
    else
        : >"$root$2"
    fi
    mount --bind "$1" "$root$2"
    mount -o "remount,bind,$3" "$root$2"
}

bind /usr /usr ro
for name in bin sbin lib lib32 lib64; do
    if [ -L "/$name" ]; then
        ln -s "$(readlink "/$name")" "$root/$name"
    elif [ -d "/$name" ]; then
        bind "/$name" "/$name" ro
    fi
done
mkdir -p "$root/etc" "$root/proc" "$root/dev" "$root/tmp" "$root/opt/overdrive"
cp /etc/ld.so.cache "$root/etc/"
echo 'overdrive:x:10001:10001::/runs:/usr/sbin/nologin' >"$root/etc/passwd"
# The names that the Indexed Job and its Service give to pods.
echo "127.0.0.1 localhost $host overdrive-nodes-0.overdrive-nodes" >"$root/etc/hosts"
for device in null zero random urandom; do
    bind "/dev/$device" "/dev/$device" rw
done
mount -t proc proc "$root/proc"
mkdir -p "$root/sys" && mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
for file in "$dist"/*; do
    bind "$file" "/opt/overdrive/${file##*/}" ro
done
bind "$deploy/entrypoint.sh" /opt/overdrive/entrypoint.sh ro
bind "$data" /data ro
bind "$runs" /runs rw
bind "$cache" /cache rw
hostname "$host"
mount -o remount,ro "$root"

set -- HOME=/runs XDG_CACHE_HOME=/cache PATH=/opt/overdrive:/usr/bin:/bin "$@"
# env takes the variables, up to the `--`; the entry script takes what follows.
variables=$#
for word in "$@"; do
    if [ "$variables" -gt 0 ] && [ "$word" = -- ]; then
        set -- "$@" /opt/overdrive/entrypoint.sh
        variables=0
    else
        set -- "$@" "$word"
    fi
    shift
done
exec chroot "$root" /usr/bin/setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs \
    --inh-caps=-all --bounding-set=-all /usr/bin/env -i --chdir=/runs "$@"
