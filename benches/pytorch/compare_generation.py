"""Runs generation by Overdrive and by transformers in turn on the same weights and prints the ratios.

    python3 benches/pytorch/compare_generation.py --rounds 3

    python3 benches/pytorch/compare_generation.py --model SmolLM2-135M-Instruct --text book.txt

Needs the torch of Overdrive's libtorch and transformers in the Python that runs it, and `cargo xtask setup` before. The
model is that of the folder, with prompts from a text, or else a Llama of 100M parameters with random weights (hidden 768, 12
layers, 12 heads, 4 key heads, intermediate 2048, vocabulary 32000, tied head) and prompts of made-up tokens, in fp32; both
sides decode greedily, and must give the same tokens. A trained model ignores most of a long prompt, which makes numbers
below 2^-126 that an Intel processor multiplies a hundred times slower, so transformers runs both as it is and with
torch.set_flush_denormal(True). The read roof is the speed at which this machine reads memory with the same threads,
divided by the bytes of the weights: no decoder of one stream in fp32 can be faster.
"""

import argparse
import json
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
    ("long_prompt", "prefill", "prefill of 1024 tokens"),
    ("long_prompt", "decode", "decode after them"),
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
    parser.add_argument("--model", help="folder of a Hugging Face model instead of random weights")
    parser.add_argument("--text", default=ROOT / "README.md", help="text of the prompts with --model")
    arguments = parser.parse_args()

    build = "cargo build --release -p overdrive-benches --bin generation"
    print(f"$ {build}", flush=True)
    if subprocess.run(build.split(), cwd=ROOT).returncode != 0:
        sys.exit("the build failed; is libtorch there? run `cargo xtask setup` first")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    binary = str(target / "release" / "generation")
    threads = ["--threads", str(arguments.threads)]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model:
            ids = Path(folder) / "prompt_ids.json"
            ids.write_text(json.dumps(tokens(arguments.model, arguments.text)))
            model = ["--model", str(Path(arguments.model).resolve()), "--prompt-ids", str(ids)]
        else:
            run([binary, "--save", folder], ROOT)
            model = ["--model", folder]
        theirs = [sys.executable, "generation.py", *model, *threads]
        sides = {
            "Overdrive": ([binary, *model, *threads], ROOT),
            "transformers": (theirs, HERE),
            "flushed": ([*theirs, "--flush-denormals"], HERE),
        }
        parameters = run([*sides["Overdrive"][0], "--case", "prefill"], ROOT)["parameters"]
        print(f"\n{processor()}, {arguments.threads} threads, {parameters:,} parameters, fp32")
        print("flushed: transformers after torch.set_flush_denormal(True)\n")
        found, roofs = [], []
        for _ in range(arguments.rounds):
            roofs.append(read_roof(arguments.threads) / (parameters * 4))
            found.append({name: run(command, cwd) for name, (command, cwd) in sides.items()})
            print(".", end="", flush=True)
    for results in found:
        for case, _, what in ROWS:
            ours, theirs = (results[name][case]["tokens"] for name in ("Overdrive", "transformers"))
            if ours != theirs:
                print(f"\n{what}: the tokens differ from number {first_difference(ours, theirs)} on")
    print(f"\n{'tokens/s':>24}{'Overdrive':>12}{'transformers':>14}{'ratio, each round':>24}{'median':>9}{'flushed':>12}{'':>9}")
    for case, speed, what in ROWS:
        ours, theirs, flushed = ([results[name][case][speed] for results in found] for name in sides)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        to_flushed = statistics.median(a / b for a, b in zip(ours, flushed, strict=True))
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"{what:>24}{statistics.median(ours):>12,.1f}{statistics.median(theirs):>14,.1f}"
            f"{each:>24}{statistics.median(ratios):>8.2f}x{statistics.median(flushed):>12,.1f}{to_flushed:>8.2f}x"
        )
    one = [results["Overdrive"]["one_stream"]["decode"] for results in found]
    share = statistics.median(speed / roof for speed, roof in zip(one, roofs, strict=True))
    print(f"\nread roof {statistics.median(roofs):.1f} tokens/s for one stream; Overdrive reaches {share:.0%} of it")
    for what, cached, uncached in [("1 stream", "cached", "uncached"), ("8 streams", "eight_cached", "eight_uncached")]:
        ours = [results["Overdrive"] for results in found]
        ratio = statistics.median(result[cached]["decode"] / result[uncached]["decode"] for result in ours)
        print(f"100 tokens of {what}: Overdrive with a cache is {ratio:.1f}x as fast as without")


def tokens(model: str, text: str) -> list[int]:
    """The first 2048 tokens of a text, enough for the prompts of all cases."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(Path(text).read_text())["input_ids"][:2048]
    if len(ids) < 1200:
        sys.exit(f"{text} has {len(ids)} tokens, the prompts take 1200; --text names a longer one")
    return ids


def first_difference(a: list[int], b: list[int]) -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    main()
