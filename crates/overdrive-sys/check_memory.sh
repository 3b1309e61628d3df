#!/usr/bin/env bash
# Searches for leaks, invalid accesses and races in the parts of the shim that own memory.
# Needs valgrind, g++ with its sanitizers, and `cargo xtask setup` before. Not part of the tests, because it
# takes minutes.
set -euo pipefail
cd "$(dirname "$0")"
libtorch=$(sed -n 's/^LIBTORCH = "\(.*\)"/\1/p' ../../.cargo/libtorch.toml 2>/dev/null || true)
libtorch=${LIBTORCH:-$libtorch}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

for sanitizer in thread address,undefined; do
  echo "allocator from eight threads under -fsanitize=$sanitizer"
  g++ -std=c++17 -O1 -g -fsanitize="$sanitizer" -isystem "$libtorch/include" \
    shim/checks/allocator_threads.cpp shim/cpu_allocator.cpp shim/status.cpp \
    -L "$libtorch/lib" -lc10 -Wl,-rpath,"$libtorch/lib" -pthread -o "$build/check"
  "$build/check"
done

# libtorch itself branches on uninitialized bits, so those reports are disabled; leaks and invalid accesses are reported.
for test in overdrive-sys/memory overdrive-sys/it overdrive-autograd/it; do
  echo "$test under valgrind"
  binary=$(cargo test -p "${test%/*}" --test "${test#*/}" --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
  OMP_NUM_THREADS=1 valgrind --quiet --undef-value-errors=no --leak-check=full \
    --show-leak-kinds=definite --errors-for-leak-kinds=definite --error-exitcode=1 \
    "$binary" --test-threads=1
done
echo "no leak, no invalid access, no race"
