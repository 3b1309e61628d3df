"""Samples a second of data parallel training at 1 and 2 processes: Overdrive and PyTorch's DDP.

    python3 benches/pytorch/compare_ddp.py

Needs the torch of Overdrive's libtorch in the Python that runs it, and Rust: it builds the example `launch`, which starts
the processes of both sides, and the benchmark `data_parallel_scaling`, which is our side. Both train the same
perceptron with the same libtorch by SGD, with one thread a process, over Gloo on loopback, with few samples a
step (reducing is most of it) and with many; runs alternate, the best of three is printed.
"""

import os
import statistics
import subprocess
import sys
import time

from compare import ROOT

SIZES = [512, 1024, 1024, 1024, 10]
BATCHES = [32, 256]


def worker(batch):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    layers = []
    for inputs, outputs in zip(SIZES, SIZES[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    if world > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    x, y = torch.randn(batch, SIZES[0]), torch.randint(10, (batch,))
    times = []
    for step in range(35):
        dist.barrier()
        start = time.perf_counter()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 5:
            times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(f"samples_per_second {batch * world / statistics.median(times):.1f}")
    dist.destroy_process_group()


def measure(command):
    env = dict(os.environ, OMP_NUM_THREADS="1")
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    for line in run.stdout.splitlines():
        if "samples_per_second" in line:
            return float(line.split()[-1])
    raise SystemExit(f"{command} printed no result\n{run.stdout}{run.stderr}")


def build(*arguments):
    subprocess.run(["cargo", "build", "--release", *arguments], cwd=ROOT, check=True)


def main():
    build("-p", "overdrive-examples", "--example", "launch")
    build("-p", "overdrive-benches", "--bin", "data_parallel_scaling")
    folder = os.path.join(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"), "release")
    best = {}
    for _ in range(3):
        for batch in BATCHES:
            for nproc in (1, 2):
                launch = [f"{folder}/examples/launch", "--nproc", str(nproc)]
                commands = {
                    "overdrive": launch + [f"{folder}/data_parallel_scaling", str(batch)],
                    "pytorch": launch + [sys.executable, os.path.abspath(__file__), "worker", str(batch)],
                }
                for name, command in commands.items():
                    key = (batch, name, nproc)
                    best[key] = max(best.get(key, 0.0), measure(command))
    for batch in BATCHES:
        for name in ("overdrive", "pytorch"):
            one, two = best[batch, name, 1], best[batch, name, 2]
            reducing = 1e3 * batch * (2 / two - 1 / one)
            print(
                f"{batch:3} samples a rank  {name:9}  1 process {one:8.1f}/s  2 processes {two:8.1f}/s"
                f"  scaling {two / one:.2f}  the second costs {reducing:5.1f} ms a step"
            )


if __name__ == "__main__":
    worker(int(sys.argv[2])) if sys.argv[1:2] == ["worker"] else main()
