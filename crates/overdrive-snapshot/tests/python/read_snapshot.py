"""Reads a snapshot without Overdrive: compares every length and checksum with manifest.json, loads every
safetensors file, and prints what is in it. Needs torch and safetensors.

    python3 read_snapshot.py run/checkpoint-120
"""

import hashlib
import json
import sys
from pathlib import Path

from safetensors.torch import load_file

folder = Path(sys.argv[1])
manifest = json.loads((folder / "manifest.json").read_text())
print(f"step {manifest['step']}, {manifest['world_size']} process(es)")
for entry in manifest["files"]:
    path = folder / entry["name"]
    data = path.read_bytes()
    assert len(data) == entry["bytes"], f"{path}: {len(data)} bytes"
    assert hashlib.sha256(data).hexdigest() == entry["sha256"], f"{path}: its bytes were changed"
    if path.suffix == ".safetensors":
        tensors = load_file(path)
        numbers = sum(tensor.numel() for tensor in tensors.values())
        print(f"{entry['name']}: {len(tensors)} tensors, {numbers} numbers")
    else:
        print(f"{entry['name']}: {entry['bytes']} bytes")
