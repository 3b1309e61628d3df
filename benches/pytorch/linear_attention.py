"""Times transformers' gated delta rule and causal convolution on the CPU, for the figures beside
`cargo bench --bench linear_attention`: the shape of Qwen3-Next, a prompt, a training step, a decode step.

    python3 linear_attention.py [--threads 2] [--cpu-time]        (torch 2.13, transformers 5.24)

The least of some runs, in milliseconds. The pools of the decode step take turns, so that the states come from memory.
"""

import argparse
import time

import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

parser = argparse.ArgumentParser()
parser.add_argument("--threads", type=int, default=torch.get_num_threads())
parser.add_argument("--cpu-time", action="store_true", help="of all threads, for machines with other work")
arguments = parser.parse_args()
torch.set_num_threads(arguments.threads)
clock = time.process_time if arguments.cpu_time else time.perf_counter
torch.manual_seed(0)
KEY_HEADS, HEADS, DIM, TOKENS = 16, 32, 128, 2048


def inputs(tokens, grad=False):
    x = [
        torch.randn(1, tokens, KEY_HEADS, DIM),
        torch.randn(1, tokens, KEY_HEADS, DIM),
        torch.randn(1, tokens, HEADS, DIM),
        -0.1 * torch.randn(1, tokens, HEADS).abs(),
        torch.randn(1, tokens, HEADS).sigmoid(),
    ]
    return [x.requires_grad_(grad) for x in x]


def rule(function, x, state=None):
    query, key, value, decay, beta = x
    return function(query, key, value, g=decay, beta=beta, initial_state=state, output_final_state=True,
                    use_qk_l2norm_in_kernel=True)


def least(name, runs, run):
    run()
    times = []
    for _ in range(runs):
        start = clock()
        run()
        times.append(clock() - start)
    print(f"{name}: {1e3 * min(times):.3f} ms", flush=True)


prompt = inputs(TOKENS)
with torch.no_grad():
    least("prompt of 2048", 5, lambda: rule(qwen.torch_chunk_gated_delta_rule, prompt))
    token = inputs(1)
    pools = [torch.zeros(1, HEADS, DIM, DIM) for _ in range(64)]

    def decode():
        for pool in pools:
            _, state = rule(qwen.torch_recurrent_gated_delta_rule, token, pool)
            pool.copy_(state)

    least("decode of 64 layers", 5, decode)
training = inputs(TOKENS, grad=True)
gradient = torch.randn(1, TOKENS, HEADS, DIM)
least("forward and backward of 2048", 2, lambda: torch.autograd.grad(
    (rule(qwen.torch_chunk_gated_delta_rule, training)[0] * gradient).sum(), training))
channels = 2 * KEY_HEADS * DIM + HEADS * DIM
x = torch.randn(1, TOKENS, channels)
weight = torch.randn(channels, 4)
with torch.no_grad():
    least("convolution of 2048", 5, lambda: qwen.causal_conv1d_fn(
        x.transpose(1, 2), weight, activation="silu").transpose(1, 2).contiguous())
