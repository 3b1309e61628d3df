"""The time of one mixture of experts of transformers, as the benchmark `experts` has it.

    python3 benches/pytorch/experts.py [--tokens 512 --hidden 512 --inner 384 --experts 32 --per-token 4]

Needs torch and transformers. It prints the median of each implementation that transformers has for a CPU.
"""

import argparse
import statistics
import time

import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock


def main():
    parser = argparse.ArgumentParser()
    for name, value in dict(tokens=512, hidden=512, inner=384, experts=32, per_token=4, rounds=7).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    flags = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(1, flags.tokens, flags.hidden)
    for training in (False, True):
        print("forward and backward" if training else "forward")
        for implementation in ("grouped_mm", "eager", "batched_mm"):
            config = MixtralConfig(
                hidden_size=flags.hidden, intermediate_size=flags.inner, num_local_experts=flags.experts,
                num_experts_per_tok=flags.per_token,
            )
            config._experts_implementation = implementation
            block = MixtralSparseMoeBlock(config)
            for parameter in block.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
            times = []
            for _ in range(flags.rounds + 1):
                own = x.clone().requires_grad_(training)
                begin = time.perf_counter()
                with torch.set_grad_enabled(training):
                    y = block(own)
                    if training:
                        y.sum().backward()
                times.append(time.perf_counter() - begin)
            print(f"  {implementation:12} {1e3 * statistics.median(times[1:]):8.2f} ms")


if __name__ == "__main__":
    main()
