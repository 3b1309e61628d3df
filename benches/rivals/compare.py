"""Measures Overdrive beside other Rust libraries: a training step of one small Llama, and decoding of one GGUF file.

    python3 benches/rivals/compare.py --build
    python3 benches/rivals/compare.py --rounds 3 --model MODEL.gguf …

Each folder beside this file is a project of one library: `train-step` runs the same step (13.8 million parameters,
fp32, AdamW, clipping, 8 sequences of 256 tokens, in the library's own words) and `decode` generates greedily from the
file, where the library can. They run in turn, each in a process of its own; ratios are medians over the rounds.

`--build` builds each project from nothing (its crates are fetched before the clock starts) and keeps the seconds in
`target/rivals/builds.json`, for the tables of later runs; processor seconds hardly change beside other programs, wall
seconds do. A run without it builds what is missing. The lines of code are those of a program's one file, without
comments and blank lines: what a user writes. Nothing else should run on the machine while it measures.
"""

import argparse
import functools
import itertools
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
TARGET = ROOT / "target" / "rivals"
BUILDS = TARGET / "builds.json"
NAMES = ["overdrive", "candle", "burn", "flodl", "rusttorch", "mistralrs"]
if "MKLROOT" in os.environ:
    # The programs of candle with Intel's MKL: a virtual environment into which pip has put mkl-static and mkl-include.
    NAMES.append("candle-mkl")
TRAIN, DECODE = ("train-step", "main.rs"), ("decode", "bin_decode.rs")
# flodl 0.8 does not compile with libtorch 2.13, whose `grad_accumulator` returns another type of pointer.
OLDER_LIBTORCH = ["flodl"]


@functools.cache
def older_libtorch():
    """Returns the folder of libtorch 2.11, which `cargo xtask setup` fetches if it is not there."""
    setup = ["cargo", "xtask", "setup", "--torch", "2.11"]
    output = subprocess.run(setup, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return re.search(r" is at (.*) \(", output)[1]


def environment(name):
    """Returns the environment: the same number of threads for all, and libtorch for those that need one."""
    settings = (ROOT / ".cargo" / "libtorch.toml").read_text()
    libtorch = os.environ.get("LIBTORCH") or re.search(r'^LIBTORCH = "(.*)"', settings, re.M)[1]
    if name in OLDER_LIBTORCH:
        libtorch = older_libtorch()
    # MKL itself is linked statically, its threads are a shared library.
    libraries = f"{os.environ['MKLROOT']}/lib" if name == "candle-mkl" else f"{libtorch}/lib"
    threads = str(os.cpu_count())
    return os.environ | {
        "LIBTORCH": libtorch,
        "LIBTORCH_PATH": libtorch,
        "LD_LIBRARY_PATH": f"{libraries}:" + os.environ.get("LD_LIBRARY_PATH", ""),
        # The fastest code that a library's compiler options give without changes to it.
        "RUSTFLAGS": "-C target-cpu=native",
        "OMP_NUM_THREADS": threads,
        "RAYON_NUM_THREADS": threads,
    }


def execute(name, command):
    """Runs a command; returns what it prints, its resources (with those of its children) and its wall seconds."""
    begin = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), env=environment(name), stdout=subprocess.PIPE, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return output, usage, time.perf_counter() - begin


def build(name):
    manifest = ["--manifest-path", HERE / name / "Cargo.toml", "--target-dir", TARGET / name]
    return execute(name, ["cargo", "build", "--release", "--quiet", *manifest])


def builds():
    return json.loads(BUILDS.read_text()) if BUILDS.exists() else {}


def build_from_nothing(name):
    execute(name, ["cargo", "fetch", "--quiet", "--manifest-path", HERE / name / "Cargo.toml"])
    shutil.rmtree(TARGET / name, ignore_errors=True)
    _, usage, wall = build(name)
    seconds = {"cpu_seconds": usage.ru_utime + usage.ru_stime, "wall_seconds": wall}
    print(f"{name}: {json.dumps(seconds)}, load average {os.getloadavg()[0]:.1f}", flush=True)
    BUILDS.write_text(json.dumps(builds() | {name: seconds}, indent=1) + "\n")


def source(name, program):
    return HERE / name.removesuffix("-mkl") / "src" / program[1]


def lines(name, program):
    text = source(name, program).read_text().splitlines()
    return sum(1 for line in text if line.strip() and not line.strip().startswith("//"))


def run(name, program, *arguments):
    output, usage, _ = execute(name, [TARGET / name / "release" / program[0], *arguments])
    # Linux counts in KiB.
    figures = json.loads(output.splitlines()[-1]) | {"max_rss_bytes": usage.ru_maxrss * 1024}
    print(f"{name} {program[0]}: {json.dumps(figures)}", flush=True)
    return figures


def table(title, program, rounds, last):
    heads = ["tokens/s", "of Overdrive", "peak memory", "lines", "build, CPU", "build, wall", last]
    print(f"\n{title}\n{'':<11}" + "".join(f"{head:>21}" for head in heads))
    for name in [name for name in NAMES if name in rounds[0]]:
        speeds = [one[name]["tokens_per_second"] for one in rounds]
        ratio = statistics.median(one[name]["tokens_per_second"] / one["overdrive"]["tokens_per_second"] for one in rounds)
        peak = max(one[name]["max_rss_bytes"] for one in rounds)
        seconds = builds().get(name)
        built = [f"{seconds[key]:,.0f} s" for key in ("cpu_seconds", "wall_seconds")] if seconds else ["", ""]
        value = statistics.median(one[name][last] for one in rounds)
        speed = f"{statistics.median(speeds):,.1f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
        cells = [speed, f"{ratio:.2f}", f"{peak / 2**20:,.0f} MiB", lines(name, program), *built, f"{value:.3f}"]
        print(f"{name:<11}" + "".join(f"{cell:>21}" for cell in cells), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="*", default=[], help="GGUF files of a Llama; nothing else is decoded")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--build", action="store_true", help="build each project from nothing, time it, and measure nothing")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    arguments = parser.parse_args()
    if arguments.build:
        TARGET.mkdir(parents=True, exist_ok=True)
        for name in arguments.only:
            build_from_nothing(name)
        return
    names = ["overdrive"] + [name for name in arguments.only if name != "overdrive"]
    for name in names:
        build(name)
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}", flush=True)
    having = lambda program: [name for name in names if source(name, program).exists()]
    in_turn = lambda program, number: having(program) if number % 2 == 0 else having(program)[::-1]
    steps, decodes = [], {model: [] for model in arguments.model}
    for number in range(arguments.rounds):
        steps.append({name: run(name, TRAIN, arguments.steps) for name in in_turn(TRAIN, number)})
        for model, rounds in decodes.items():
            rounds.append({name: run(name, DECODE, model, 64, 64) for name in in_turn(DECODE, number)})
    table("training step", TRAIN, steps, "first_loss")
    for model, rounds in decodes.items():
        table(f"decode, one sequence, {model}", DECODE, rounds, "first_token_seconds")
        for name, figures in rounds[0].items():
            pairs = zip(figures["tokens"], rounds[0]["overdrive"]["tokens"])
            print(f"{name}: the first {sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))} tokens are Overdrive's")


if __name__ == "__main__":
    main()
