"""Times PyTorch's training step. Prints one JSON line; see compare.py, which runs both sides.

python3 train_step.py --preset small --steps 10 --threads 2
"""

import argparse
import json
import resource
import statistics
import time

import torch

from llama import PRESETS, Llama, load_trained, optimizer_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--model", help="folder of weights and batches instead of random ones")
    parser.add_argument("--flush-denormals", action="store_true", help="torch.set_flush_denormal(True)")
    arguments = parser.parse_args()
    # It reaches this thread. The others get it because they start later.
    if arguments.flush_denormals and not torch.set_flush_denormal(True):
        raise SystemExit("this processor cannot flush denormals")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    shape = PRESETS[arguments.preset]
    model = Llama(shape)
    batches = load_trained(model, arguments.model) if arguments.model else []
    optimizer = optimizer_of(model)
    run = torch.compile(model) if arguments.compile else model

    seconds, losses = [], []
    for step in range(arguments.warmup + arguments.steps):
        ids = batches[step % len(batches)] if batches else torch.randint(shape.vocab, (shape.batch, shape.context + 1))
        start = time.perf_counter()
        loss = run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step >= arguments.warmup:
            seconds.append(time.perf_counter() - start)

    tokens = shape.batch * shape.context
    print(
        json.dumps(
            {
                "side": f"PyTorch {torch.__version__}" + (" compiled" if arguments.compile else ""),
                "parameters": sum(p.numel() for p in model.parameters()),
                "threads": torch.get_num_threads(),
                "step_seconds": statistics.median(seconds),
                "tokens_per_second": tokens / statistics.median(seconds),
                "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "first_loss": losses[0],
                "last_loss": losses[-1],
            }
        )
    )


if __name__ == "__main__":
    main()
