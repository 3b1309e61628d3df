"""Compiles the kernels of manifest.toml to `kernels.bin.zst` and `kernels.json` in the folder given as argument.

Needs no GPU and no CUDA toolkit: Triton brings LLVM and ptxas. The same Triton gives the same bytes on every machine.
"""

import hashlib
import importlib
import json
import os
import re
import sys
import tempfile
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

# Before Triton is imported. Without line information the result does not depend on where the sources lie.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

HERE = Path(__file__).resolve().parent
DTYPES = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
# The pointers to scratch memory that Triton adds behind the arguments, also where they are not used.
HIDDEN = 2
# What the driver allows a block of every architecture from 8.0 on; 8.6, 8.9 and 12.0 have the least.
MOST_SHARED = 99 * 1024


def variants(kernel):
    """Yields each variant of a kernel: its dtype, constants, absent arguments, warps, stages, and if it is aligned."""
    alignments = [True, False] if kernel.get("unaligned") else [True]
    for mode in kernel["modes"]:
        buckets = kernel["buckets"]
        for bucket in buckets[mode["buckets"]] if "buckets" in mode else buckets:
            constants = mode["constants"] | {k: v for k, v in bucket.items() if k.isupper()}
            for aligned in alignments:
                for dtype in mode.get("dtypes", bucket.get("dtypes", kernel["dtypes"])):
                    yield {
                        "kernel": kernel["name"],
                        "dtype": dtype,
                        "constants": constants,
                        "aligned": aligned,
                        "without": mode.get("without", []),
                        "warps": bucket["warps"],
                        "stages": bucket.get("stages", 1),
                    }


def signature(kernel, variant):
    """Returns the types of the arguments that the variant has, by name."""
    element = DTYPES[variant["dtype"]]
    present = {n: t for n, t in kernel["arguments"].items() if n not in variant["without"]}
    constants = variant["constants"]
    code = "i8" if constants.get("FORMAT") == 0 else "u8"
    scale = "u8" if constants.get("NESTED") else "fp16" if constants.get("HALF_SCALES") else "fp32"
    wide = "fp32" if constants.get("MIXED") else element
    types = {"*T": f"*{element}", "*W": f"*{wide}", "*C": f"*{code}", "*S": f"*{scale}"}
    return {name: types.get(type, type) for name, type in present.items()}


def check_ptx(ptx, types, symbol):
    """Compares the parameters in the PTX with the arguments that the manifest promises to the launcher."""
    declared = re.search(rf"\.visible \.entry {symbol}\((.*?)\)", ptx, re.DOTALL)
    assert declared, f"the PTX has no entry {symbol}"
    found = re.findall(r"\.param \.(u64|u32|b64|b32|f32|s32|s64)", declared[1])
    size = {"i32": 4, "i64": 8, "fp32": 4}
    expected = [size.get(type, 8) for type in types] + [8] * HIDDEN
    assert [int(kind[1:]) // 8 for kind in found] == expected, f"{symbol}: {found} is not {expected}"


def compile_variant(function, kernel, variant, target):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = signature(kernel, variant)
    constants = dict(variant["constants"]) | {name: None for name in variant["without"]}
    arguments = {n: types.get(n, "constexpr") for n in function.arg_names}
    hinted = [n for n, t in types.items() if t.startswith("*")]
    if variant["aligned"]:
        hinted += [n for n in kernel["aligned"] if n in types]
    attributes = {(function.arg_names.index(n),): [["tt.divisibility", 16]] for n in hinted}
    source = ASTSource(function, arguments, constants, attributes)
    capability = int(re.fullmatch(r"sm_(\d+)a?", target)[1])
    options = {"num_warps": variant["warps"], "num_stages": variant["stages"]}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    metadata = compiled.metadata
    assert metadata.global_scratch_size == 0 and metadata.profile_scratch_size == 0
    assert metadata.num_ctas == 1 and metadata.shared <= MOST_SHARED, metadata.shared
    assert metadata.num_warps == variant["warps"]
    check_ptx(compiled.asm["ptx"], list(types.values()), metadata.name)
    return compiled


def function_of(kernel):
    sys.path[:0] = [] if str(HERE) in sys.path else [str(HERE)]
    function = getattr(importlib.import_module(kernel["file"].removesuffix(".py")), kernel["name"])
    expected = [n for n in function.arg_names if not n.isupper()]
    assert list(kernel["arguments"]) == expected, f"{kernel['name']}: the manifest has other arguments"
    return function


def image_of(job):
    """Compiles a variant for a target; returns the image, the shared memory that it needs, and its symbol."""
    kernel, variant, name, target = job
    compiled = compile_variant(function_of(kernel), kernel, variant, target)
    # The driver reads PTX as a C string.
    image = compiled.asm["ptx"].encode() + b"\0" if name == "ptx" else compiled.asm["cubin"]
    return image, compiled.metadata.shared, compiled.metadata.name


def main(out):
    import zstandard

    manifest = tomllib.loads((HERE / "manifest.toml").read_text())
    targets = {name: name for name in manifest["targets"]} | {"ptx": manifest["ptx"]}
    pairs = [(kernel, variant) for kernel in manifest["kernel"] for variant in variants(kernel)]
    jobs = [(*pair, name, target) for pair in pairs for name, target in targets.items()]
    with ProcessPoolExecutor() as pool:
        images = iter(list(pool.map(image_of, jobs, chunksize=10)))
    streams = {name: bytearray() for name in targets}
    entries = []
    for kernel, variant in pairs:
        entry = {key: variant[key] for key in ("kernel", "dtype", "aligned", "constants", "warps")}
        entry |= {"symbol": "", "arguments": list(signature(kernel, variant).items()), "images": {}}
        for name, stream in streams.items():
            image, shared, entry["symbol"] = next(images)
            sha256 = hashlib.sha256(image).hexdigest()
            place = {"offset": len(stream), "length": len(image)}
            entry["images"][name] = place | {"shared": shared, "sha256": sha256}
            stream += image
        entries.append(entry)
    packed, parts = bytearray(), {}
    for name, stream in streams.items():
        compressed = zstandard.ZstdCompressor(level=19).compress(bytes(stream))
        parts[name] = {"offset": len(packed), "length": len(compressed), "size": len(stream)}
        packed += compressed
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
    sources = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in source_files()}
    text = "{\n"
    text += f'  "hidden_pointers": {HIDDEN},\n'
    text += f'  "sources": {json.dumps(sources)},\n'
    text += f'  "targets": {json.dumps(parts)},\n'
    text += f'  "variants": [\n{lines}\n  ]\n}}\n'
    out.mkdir(parents=True, exist_ok=True)
    (out / "kernels.bin.zst").write_bytes(packed)
    (out / "kernels.json").write_text(text)
    print(f"{len(entries)} variants for {len(targets)} targets, {len(packed)} bytes")


def source_files():
    """Returns the files that the kernels are made of."""
    manifest = tomllib.loads((HERE / "manifest.toml").read_text())
    files = {"manifest.toml", "requirements.txt", "build.py"} | {k["file"] for k in manifest["kernel"]}
    return [HERE / name for name in sorted(files)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        # A cache that is given serves those who change one kernel after another.
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        main(Path(sys.argv[1]))
