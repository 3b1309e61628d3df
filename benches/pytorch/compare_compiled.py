"""Runs a compiled package, our model operator by operator and fused, and PyTorch eager and compiled.

    python3 benches/pytorch/compare_compiled.py --model runs/tiny/model --rounds 3

Needs the torch of Overdrive's libtorch and transformers in the Python that runs it, a C++ compiler, and `cargo xtask setup`
before. MODEL is a Hugging Face folder, such as `train` writes; the package is made of it first, unless
--package names one. Greedy decoding in fp32, the same prompt and threads on every side, weights the
same; our three sides must give the same tokens, and so must PyTorch's two. The sides take turns, so that
a machine whose speed drifts drifts for all; quote the median ratios. For the training step, ours beside
PyTorch's eager and compiled, see compare.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import HERE, ROOT, processor


def lines(command: list[str], cwd: Path) -> dict[str, dict]:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"$ {' '.join(command)}\n{result.stderr}")
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line["side"]: line for line in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--package", type=Path, help="made of MODEL before [default: make one]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--no-build", action="store_true", help="the example is built already")
    arguments = parser.parse_args()

    build = "cargo build --release -p overdrive-examples --features packages --example packages"
    if not arguments.no_build and subprocess.run(build.split(), cwd=ROOT).returncode != 0:
        sys.exit("the build failed; is libtorch there? run `cargo xtask setup` first")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    with tempfile.TemporaryDirectory() as folder:
        package = arguments.package
        if package is None:
            package = Path(folder) / "model.pt2"
            script = ROOT / "crates/overdrive-packages/python/compile_package.py"
            flags = ["--model", arguments.model, "--output", package, "--models", "prefill,decode"]
            subprocess.run([sys.executable, script, *flags], check=True)
        model = str(arguments.model.resolve())
        same = ["--model", model, "--threads", str(arguments.threads), "--batch", str(arguments.batch)]
        ours = [str(target / "release/examples/packages"), "--package", str(package.resolve()), "--compare", *same]
        theirs = [sys.executable, "compiled.py", *same]
        rounds = [lines(ours, ROOT) | lines(theirs, HERE) for _ in range(arguments.rounds)]

    print(f"\n{processor()}, {arguments.threads} threads, batch {arguments.batch}, fp32; medians of {len(rounds)}\n")
    print(f"{'tokens/s':>16}{'prefill':>12}{'x eager':>10}{'x compile':>11}{'decode':>12}{'x eager':>10}{'x compile':>11}")
    for side in rounds[0]:
        row = f"{side:>16}"
        for what in ("prefill", "decode"):
            speed = [found[side][what] for found in rounds]
            row += f"{statistics.median(speed):>12,.0f}"
            for other, width in (("PyTorch eager", 9), ("torch.compile", 10)):
                ratio = statistics.median(found[side][what] / found[other][what] for found in rounds)
                row += f"{ratio:>{width}.2f}x"
        print(row)


if __name__ == "__main__":
    main()
