"""Runs Overdrive's training step and PyTorch's in turn and prints the ratio.

    python3 benches/pytorch/compare.py --preset small --rounds 3

Needs the torch of Overdrive's libtorch and safetensors in the Python that runs it, and `cargo xtask setup` before. Both
sides: the same threads, weights and tokens, forward, backward, clipping to norm 1, fused AdamW with decay groups, in fp32.
The weights have learned from the text of `cargo xtask train` (or of --data) for --trained-steps steps, and the tokens are
those that follow; 0 steps are random weights and tokens. Trained attention ignores most keys, which makes numbers below
2^-126 that an Intel processor multiplies a hundred times slower, so PyTorch runs both as it is and with
torch.set_flush_denormal(True). Overdrive runs by its fused kernels and operator by operator, PyTorch eagerly and
through torch.compile (Inductor needs a C++ compiler). The sides take turns, so that a machine whose speed
drifts drifts for all; quote the median ratio.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
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
    parser.add_argument("--trained-steps", type=int, default=300, help="0 for random weights and tokens")
    parser.add_argument("--data", action="append", default=[], help="text to train on, instead of that of `train`")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(arguments, folder)


def compare(arguments: argparse.Namespace, folder: str) -> None:
    build = "cargo build --release -p overdrive-benches --bin train_step"
    print(f"$ {build}", flush=True)
    if subprocess.run(build.split(), cwd=ROOT).returncode != 0:
        sys.exit("the build failed; is libtorch there? run `cargo xtask setup` first")
    flags = ["--preset", arguments.preset, "--steps", str(arguments.steps), "--threads", str(arguments.threads)]
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    ours_command = [str(target / "release" / "train_step"), *flags]
    theirs_command = [sys.executable, "train_step.py", *flags]
    weights = "random weights"
    if arguments.trained_steps:
        weights = f"weights after {arguments.trained_steps} steps"
        data = [word for path in arguments.data for word in ("--data", path)]
        print(f"training the model for {arguments.trained_steps} steps", flush=True)
        run([*ours_command, "--save", folder, "--trained-steps", str(arguments.trained_steps), *data], ROOT)
        for command in (ours_command, theirs_command):
            command.extend(["--model", folder])
    unfused = ([*ours_command, "--unfused"], ROOT)
    sides = {"Overdrive": (ours_command, ROOT), "unfused": unfused, "eager": (theirs_command, HERE)}
    if not arguments.no_compile:
        sides["compiled"] = ([*theirs_command, "--compile", "--warmup", "3"], HERE)
    for name in [name for name, (command, _) in sides.items() if command[0] == sys.executable]:
        sides[f"{name} flushed"] = ([*sides[name][0], "--flush-denormals"], HERE)
    others = [name for name in sides if name != "Overdrive"]

    print(f"\n{processor()}, {arguments.threads} threads, preset {arguments.preset}, {weights}, fp32, tokens/s\n")
    print("round" + "".join(f"{name:>18}" for name in sides) + "".join(f"{'/ ' + name:>19}" for name in others))
    speeds = {name: [] for name in sides}
    memory = {name: [] for name in sides}
    losses = {}
    for index in range(arguments.rounds):
        found = {name: run(command, cwd) for name, (command, cwd) in sides.items()}
        if len({result["parameters"] for result in found.values()}) != 1:
            sys.exit(f"different models: {found}")
        for name, result in found.items():
            speeds[name].append(result["tokens_per_second"])
            memory[name].append(result["max_rss_bytes"])
            losses[name] = result["first_loss"]
        ratios = [speeds["Overdrive"][-1] / speeds[name][-1] for name in others]
        print(
            f"{index + 1:>5}"
            + "".join(f"{speeds[name][-1]:>18,.0f}" for name in sides)
            + "".join(f"{ratio:>18.2f}x" for ratio in ratios),
            flush=True,
        )

    print(f"\n{'median':>24}{'tokens/s':>12}{'Overdrive is':>14}{'max RSS, MiB':>14}{'first loss':>12}")
    for name in sides:
        ratio = statistics.median(a / b for a, b in zip(speeds["Overdrive"], speeds[name], strict=True))
        print(
            f"{name:>24}{statistics.median(speeds[name]):>12,.0f}{ratio:>13.2f}x"
            f"{statistics.median(memory[name]) / 2**20:>14,.0f}{losses[name]:>12.3f}"
        )


if __name__ == "__main__":
    main()
