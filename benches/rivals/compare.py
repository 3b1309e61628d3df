"""Measures Overdrive beside other Rust libraries: a training step of one small Llama, and decoding of one GGUF file.

    python3 benches/rivals/compare.py --rounds 3 [--model MODEL.gguf] [--build]

Each folder beside this file is a project of one library: `train-step` runs the same step (13.8 million parameters,
fp32, AdamW, clipping, 8 sequences of 256 tokens, in the library's own words) and `decode` generates greedily from the
file, where the library can. They run in turn, each in a process of its own; ratios are medians over the rounds.

`--build` first builds each project from nothing and prints the seconds; without it they are built if need be. The lines of
code are those of `src/main.rs`, without comments and blank lines: what a user writes for the step. Nothing else should run on the machine.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NAMES = ["overdrive", "candle", "burn", "flodl"]


def environment():
    """Returns the environment with the libtorch of the workspace, for those that need one."""
    settings = (ROOT / ".cargo" / "libtorch.toml").read_text()
    libtorch = os.environ.get("LIBTORCH") or re.search(r'^LIBTORCH = "(.*)"', settings, re.M)[1]
    return os.environ | {
        "LIBTORCH": libtorch,
        "LIBTORCH_PATH": libtorch,
        "LD_LIBRARY_PATH": f"{libtorch}/lib:" + os.environ.get("LD_LIBRARY_PATH", ""),
        # The fastest code that a library's compiler options give without changes to it.
        "RUSTFLAGS": "-C target-cpu=native",
    }


def target(name):
    return ROOT / "target" / "rivals" / name


def build(name, from_nothing):
    if from_nothing:
        shutil.rmtree(target(name), ignore_errors=True)
    begin = time.perf_counter()
    command = ["cargo", "build", "--release", "--quiet", "--manifest-path", str(HERE / name / "Cargo.toml")]
    subprocess.run(command + ["--target-dir", str(target(name))], env=environment(), check=True)
    return time.perf_counter() - begin


def lines(name):
    text = (HERE / name / "src" / "main.rs").read_text().splitlines()
    return sum(1 for line in text if line.strip() and not line.strip().startswith("//"))


def has(name, source):
    return (HERE / name / "src" / source).exists()


def run(name, program, *arguments):
    command = [str(target(name) / "release" / program), *map(str, arguments)]
    process = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    return json.loads(process.stdout.splitlines()[-1])


def table(title, rounds, names, extra):
    print(f"\n{title}\n{'':<11}{'tokens/s':>10}{'of Overdrive':>14}" + "".join(f"{key:>14}" for key, _ in extra))
    for name in names:
        speeds = [one[name]["tokens_per_second"] for one in rounds]
        ratio = statistics.median(one[name]["tokens_per_second"] / one["overdrive"]["tokens_per_second"] for one in rounds)
        cells = "".join(f"{value(name):>14}" for _, value in extra)
        print(f"{name:<11}{statistics.median(speeds):>10.1f}{ratio:>14.2f}{cells}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="GGUF file of a Llama; without it nothing is decoded")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--build", action="store_true", help="build each project from nothing, and time it")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    arguments = parser.parse_args()
    names = ["overdrive"] + [name for name in arguments.only if name != "overdrive"]
    seconds = {name: build(name, arguments.build) for name in names}
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}", flush=True)
    steps, decodes = [], []
    for number in range(arguments.rounds):
        order = names if number % 2 == 0 else names[::-1]
        steps.append({name: run(name, "train-step", arguments.steps) for name in order if has(name, "main.rs")})
        decoding = [name for name in order if has(name, "bin_decode.rs")]
        if arguments.model:
            decodes.append({name: run(name, "decode", arguments.model, 64, 64) for name in decoding})
    peak = lambda rounds: lambda name: f"{max(one[name]['max_rss_bytes'] for one in rounds) / 2**20:.0f} MiB"
    extra = [("peak memory", peak(steps)), ("lines", lines)]
    if arguments.build:
        extra.append(("build", lambda name: f"{seconds[name]:.0f} s"))
    extra.append(("first loss", lambda name: f"{steps[0][name]['first_loss']:.3f}"))
    table("training step", steps, [name for name in names if name in steps[0]], extra)
    if decodes:
        first = lambda name: f"{statistics.median(one[name]['first_token_seconds'] for one in decodes):.2f} s"
        table("decode, one sequence", decodes, [name for name in names if name in decodes[0]], [("first token", first)])


if __name__ == "__main__":
    main()
