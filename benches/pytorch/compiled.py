"""Times a model's prefill and decode by PyTorch, eager and by torch.compile. Prints a JSON line for each;
see compare_compiled.py, which runs all sides.

python3 compiled.py --model DIR --threads 2

Eager is transformers as it is called most: `forward` with its DynamicCache. Compiled is the very graph
of the package (crates/overdrive-packages/python/compile_package.py): the model over a static cache that
is written in place, so that torch.compile makes no graph anew as the text grows.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "crates/overdrive-packages/python"))
from compile_package import step, with_forward  # noqa: E402


def eager_side(model):
    cache = None

    def run(ids, place):
        nonlocal cache
        output = model(input_ids=ids, past_key_values=cache if place else None, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        return output.logits

    return run


def compiled_side(model, batch):
    config = model.config
    heads = config.num_key_value_heads or config.num_attention_heads
    shape = (batch, heads, config.max_position_embeddings, config.head_dim)
    keys, values = ([torch.zeros(shape) for _ in range(config.num_hidden_layers)] for _ in range(2))
    with_forward(model, step)
    whole, one = torch.compile(model.forward), torch.compile(model.forward)

    def run(ids, place):
        positions = torch.arange(place, place + ids.shape[1])
        return (one if ids.shape[1] == 1 else whole)(ids, positions, keys, values)

    return run


def measure(side, run, arguments, prompt):
    prefills, decodes, tokens = [], [], []
    for _ in range(arguments.rounds + 1):
        tokens = []
        start = time.perf_counter()
        logits = run(prompt, 0)
        prefills.append(prompt.numel() / (time.perf_counter() - start))
        start = time.perf_counter()
        for place in range(arguments.new_tokens):
            following = logits.argmax(-1)
            logits = run(following, prompt.shape[1] + place)
            tokens.append(following[:, 0].tolist())
        decodes.append(len(prompt) * arguments.new_tokens / (time.perf_counter() - start))
    line = {"side": side, "threads": torch.get_num_threads()}
    # The first round compiles.
    line |= {"prefill": statistics.median(prefills[1:]), "decode": statistics.median(decodes[1:])}
    print(json.dumps(line), flush=True)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, attn_implementation="sdpa")
    model.eval().requires_grad_(False)
    numbers = torch.arange(arguments.batch * arguments.prompt) * 104729 + 13
    prompt = (numbers % model.config.vocab_size).view(arguments.batch, arguments.prompt)
    with torch.inference_mode():
        first = measure("PyTorch eager", eager_side(model), arguments, prompt)
    with torch.no_grad():
        second = measure("torch.compile", compiled_side(model, arguments.batch), arguments, prompt)
    if first != second:
        sys.exit("eager and compiled give different tokens")


if __name__ == "__main__":
    main()
