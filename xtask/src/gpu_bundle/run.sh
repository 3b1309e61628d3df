#!/bin/sh
# Runs gpu-check with the libtorch of this machine's Python: ./run.sh [--section NAME ...]
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
python=${OVERDRIVE_PYTHON:-python3}

# torch is not imported: that takes seconds.
libraries=$("$python" - <<'PYTHON'
import glob
import importlib.metadata
import importlib.util
import os
import sys

try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit("this Python has no torch; set OVERDRIVE_PYTHON to another interpreter")
if not version.startswith("2.11."):
    sys.exit(f"this Python has torch {version}; the program needs 2.11; set OVERDRIVE_PYTHON to another interpreter")
torch = os.path.dirname(os.path.realpath(importlib.util.find_spec("torch").origin))
folders = [os.path.join(torch, "lib")]
# CUDA's libraries are in separate packages.
nvidia = importlib.util.find_spec("nvidia")
for root in nvidia.submodule_search_locations if nvidia else []:
    folders += sorted(glob.glob(os.path.join(os.path.realpath(root), "*", "lib")))
print(":".join(folders))
PYTHON
)

# Python itself is started with the original path.
export OVERDRIVE_OUTER_LIBRARY_PATH="${LD_LIBRARY_PATH-}"
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
OVERDRIVE_COMMIT=$(cat "$here/commit")
export OVERDRIVE_COMMIT
exec "$here/gpu-check" "$@"
