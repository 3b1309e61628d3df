"""Runs Overdrive's training step and PyTorch's in turn and prints the ratio.

    python3 benches/pytorch/compare.py --preset small --rounds 3

Needs torch==2.11.0 in the Python that runs it, and `cargo xtask setup` before. Both sides: the same
shapes, the same threads, random tokens, forward, backward, clipping to norm 1, fused AdamW with
decay groups, in fp32. The sides take turns, so that a machine whose speed drifts drifts for both;
quote the median ratio.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def run(command: list[str], cwd: Path) -> dict:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"$ {' '.join(command)}\n{result.stderr}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=["tiny", "small"], default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()

    build = "cargo build --release -p overdrive-benches --bin train_step"
    print(f"$ {build}", flush=True)
    if subprocess.run(build.split(), cwd=ROOT).returncode != 0:
        sys.exit("the build failed; is libtorch there? run `cargo xtask setup` first")
    flags = ["--preset", arguments.preset, "--steps", str(arguments.steps), "--threads", str(arguments.threads)]
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    ours_command = [str(target / "release" / "train_step"), *flags]
    theirs_command = [sys.executable, "train_step.py", *flags]

    print(f"\n{processor()}, {arguments.threads} threads, preset {arguments.preset}, fp32\n")
    print(f"{'round':>5}  {'Overdrive':>18}  {'PyTorch':>18}  {'ratio':>6}  {'RSS, MiB':>15}")
    ratios, ours_all, theirs_all = [], [], []
    for index in range(arguments.rounds):
        ours = run(ours_command, ROOT)
        theirs = run(theirs_command, HERE)
        if ours["parameters"] != theirs["parameters"]:
            sys.exit(f"different models: {ours['parameters']} and {theirs['parameters']} parameters")
        ratios.append(ours["tokens_per_second"] / theirs["tokens_per_second"])
        ours_all.append(ours["tokens_per_second"])
        theirs_all.append(theirs["tokens_per_second"])
        print(
            f"{index + 1:>5}  {ours_all[-1]:>10,.0f} tokens/s  {theirs_all[-1]:>10,.0f} tokens/s"
            f"  {ratios[-1]:>5.2f}x  {ours['max_rss_bytes'] >> 20:>6} / {theirs['max_rss_bytes'] >> 20:>6}",
            flush=True,
        )
    print(
        f"\nmedian: Overdrive {statistics.median(ours_all):,.0f} tokens/s, {theirs['side']}"
        f" {statistics.median(theirs_all):,.0f} tokens/s, ratio {statistics.median(ratios):.2f}x"
        f" (first losses {ours['first_loss']:.3f} and {theirs['first_loss']:.3f})"
    )


if __name__ == "__main__":
    main()
