#!/bin/sh
# Copies a Cargo workspace without its code: manifests, lock file, Cargo's configuration, and an empty program
# instead of each target. Building it compiles only the dependencies of the workspace; it changes only if a manifest
# changes or a target is added or removed.
#
#     deploy/skeleton.sh FROM TO
set -eu

from=${1:?usage: skeleton.sh FROM TO}
to=${2:?usage: skeleton.sh FROM TO}

cd "$from"
find . -name target -prune -o \
    \( -name Cargo.toml -o -name Cargo.lock -o -path ./.cargo/config.toml \
    -o -name build.rs -o -path '*/src/lib.rs' -o -path '*/src/main.rs' -o -path '*/src/bin/*.rs' \
    -o -path '*/examples/*.rs' -o -path '*/benches/*.rs' \) -type f -print |
    while IFS= read -r file; do
        mkdir -p "$to/$(dirname "$file")"
        case $file in
            # Serves as a library, a program, a benchmark and a build script.
            *.rs) echo 'fn main() {}' >"$to/$file" ;;
            *) cp "$file" "$to/$file" ;;
        esac
    done
