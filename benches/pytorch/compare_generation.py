"""Runs generation by Overdrive and by transformers in turn on the same weights and prints the ratios.

    python3 benches/pytorch/compare_generation.py --rounds 3

Needs the torch of Overdrive's libtorch and transformers in the Python that runs it, and `cargo xtask setup` before. The
model is a Llama of 100M parameters in fp32 with random weights (hidden 768, 12 layers, 12 heads, 4 key
heads, intermediate 2048, vocabulary 32000, tied head); both sides decode greedily, and must give the
same tokens. The read roof is the speed at which this machine reads memory with the same threads,
divided by the bytes of the weights: no decoder of one stream in fp32 can be faster.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare import HERE, ROOT, processor, run

#      case, which speed, what it is
ROWS = [
    ("prefill", "prefill", "prefill of 512 tokens"),
    ("one_stream", "decode", "decode, 1 stream"),
    ("eight_streams", "decode", "decode, 8 streams"),
    ("cached", "decode", "100 tokens, cached"),
    ("uncached", "decode", "100 tokens, no cache"),
]


def read_roof(threads: int) -> float:
    """Bytes a second: the best of ten sums over 400 MB."""
    import torch

    torch.set_num_threads(threads)
    numbers = torch.ones(100_000_000)
    best = 0.0
    for _ in range(10):
        start = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.numel() * 4 / (time.perf_counter() - start))
    return best


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
    threads = ["--threads", str(arguments.threads)]
    with tempfile.TemporaryDirectory() as folder:
        parameters = run([binary, "--save", folder], ROOT)["parameters"]
        sides = {
            "Overdrive": ([binary, "--model", folder, *threads], ROOT),
            "transformers": ([sys.executable, "generation.py", "--model", folder, *threads], HERE),
        }
        print(f"\n{processor()}, {arguments.threads} threads, {parameters:,} parameters, fp32\n")
        found, roofs = [], []
        for _ in range(arguments.rounds):
            roofs.append(read_roof(arguments.threads) / (parameters * 4))
            found.append({name: run(command, cwd) for name, (command, cwd) in sides.items()})
            print(".", end="", flush=True)
    for results in found:
        for case, _, what in ROWS:
            ours, theirs = (results[name][case]["tokens"] for name in sides)
            if ours != theirs:
                print(f"\n{what}: the tokens differ from number {first_difference(ours, theirs)} on")
    print(f"\n{'tokens/s':>24}{'Overdrive':>12}{'transformers':>14}{'ratio, each round':>24}{'median':>9}")
    for case, speed, what in ROWS:
        ours, theirs = ([results[name][case][speed] for results in found] for name in sides)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"{what:>24}{statistics.median(ours):>12,.1f}{statistics.median(theirs):>14,.1f}"
            f"{each:>24}{statistics.median(ratios):>8.2f}x"
        )
    one = [results["Overdrive"]["one_stream"]["decode"] for results in found]
    share = statistics.median(speed / roof for speed, roof in zip(one, roofs, strict=True))
    print(f"\nread roof {statistics.median(roofs):.1f} tokens/s for one stream; Overdrive reaches {share:.0%} of it")
    for what, cached, uncached in [("1 stream", "cached", "uncached"), ("8 streams", "eight_cached", "eight_uncached")]:
        ours = [results["Overdrive"] for results in found]
        ratio = statistics.median(result[cached]["decode"] / result[uncached]["decode"] for result in ours)
        print(f"100 tokens of {what}: Overdrive with a cache is {ratio:.1f}x as fast as without")


def first_difference(a: list[int], b: list[int]) -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    main()
