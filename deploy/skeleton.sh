#!/bin/sh
# Copies a Cargo workspace without its code: manifests, lock file, Cargo's configuration, and an empty program
# in the place of each target. What is built of it is what the workspace depends on; it changes only when a
# manifest does or a target comes or goes.
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
