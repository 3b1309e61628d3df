"""Times generation with quantized weights, by Overdrive and by transformers with quantize_dynamic.

    python3 benches/pytorch/compare_quantized.py --rounds 3

Needs what compare_generation.py needs, and has its model and cases. Every linear map is quantized, the
head too; Overdrive's embedding is the head's quantized table, that of transformers stays in fp32. All
sides run in turn, each in a process of its own. The read roof of a scheme is the speed at which this
machine reads memory with the same threads, divided by the bytes of its weights.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import HERE, ROOT, processor, run
from compare_generation import read_roof

SCHEMES = ["int8", "int4-g32", "nf4"]
CASES = [("prefill", "prefill"), ("one_stream", "decode"), ("eight_streams", "decode")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()

    build = "cargo build --release -p overdrive-benches --bin generation"
    print(f"$ {build}", flush=True)
    if subprocess.run(build.split(), cwd=ROOT).returncode != 0:
        sys.exit("the build failed; is libtorch there? run `cargo xtask setup` first")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    binary = str(target / "release" / "generation")
    with tempfile.TemporaryDirectory() as folder:
        parameters = run([binary, "--save", folder], ROOT)["parameters"]
        common = ["--model", folder, "--threads", str(arguments.threads)]
        python = [sys.executable, "generation.py", *common]
        sides = {
            "transformers fp32": (python, HERE),
            "transformers int8": ([*python, "--quantize-dynamic"], HERE),
            "Overdrive fp32": ([binary, *common], ROOT),
        }
        for scheme in SCHEMES:
            sides[f"Overdrive {scheme}"] = ([binary, *common, "--quantize", scheme], ROOT)
        print(f"\n{processor()}, {arguments.threads} threads, {parameters:,} parameters; tokens/s, medians\n")
        roofs, found = [], []
        for _ in range(arguments.rounds):
            roofs.append(read_roof(arguments.threads))
            results = {}
            for name, (command, cwd) in sides.items():
                for case, speed in CASES:
                    results[name, case] = (line := run([*command, "--case", case], cwd))[case][speed]
                results[name, "bytes"] = line.get("bytes")
            found.append(results)
            print(".", end="", flush=True)
    print(f"\n{'':>20}{'weights':>10}{'prefill 512':>13}{'1 stream':>10}{'8 streams':>11}{'of the roof, 1 stream':>24}")
    for name in sides:
        size = found[0][name, "bytes"]
        speeds = [statistics.median(results[name, case] for results in found) for case, _ in CASES]
        share = ""
        if size:
            shares = [results[name, "one_stream"] * size / roof for results, roof in zip(found, roofs, strict=True)]
            share = f"{statistics.median(shares):.0%} of {statistics.median(roofs) / size:.0f}"
        size = f"{size / 1e6:.1f} MB" if size else ""
        print(f"{name:>20}{size:>10}{speeds[0]:>13,.0f}{speeds[1]:>10.1f}{speeds[2]:>11.1f}{share:>24}")


if __name__ == "__main__":
    main()
