"""Times decoding by transformers for `cargo xtask gpu-check`, and prints one JSON line.

`dynamic` is a cache that grows, step by step in eager PyTorch, as `generate` does it. `static` is a cache of fixed size with
`torch.compile(mode="reduce-overhead")`, which captures the step in a CUDA graph. The weights are random, in bf16.

python3 gpu_decode.py --variant static --device cuda --streams 1 64
"""

import argparse
import json
import time

WARM_UP = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--seconds", type=float, default=120.0, help="the time after which the caller ends this program")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    for name, default in [
        ("vocab", 128_256),
        ("dim", 2048),
        ("layers", 16),
        ("heads", 32),
        ("kv-heads", 8),
        ("hidden", 8192),
        ("context", 2048),
        ("batch", 8),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    print(json.dumps(measure(parser.parse_args())))


def measure(arguments) -> dict:
    try:
        import torch
        import transformers
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
    except Exception as error:  # a package may also fail to load its libraries
        return {"missing": f"transformers cannot be imported: {error}"}
    torch.manual_seed(0)
    on_gpu = arguments.device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    config = LlamaConfig(
        vocab_size=arguments.vocab,
        hidden_size=arguments.dim,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        intermediate_size=arguments.hidden,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    # The CPU is there to test this program; its bf16 may be emulated.
    with torch.device(arguments.device):
        model = LlamaForCausalLM(config).to(torch.bfloat16 if on_gpu else torch.float32).eval()
    run = torch.compile(model, mode="reduce-overhead", fullgraph=True) if arguments.variant == "static" else model

    @torch.no_grad()
    def decode(streams: int) -> dict:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if arguments.variant == "static":
            room = arguments.prompt + WARM_UP + arguments.new
            cache = StaticCache(config=config, max_cache_len=room)
        else:
            cache = DynamicCache(config=config)
        ids = torch.randint(arguments.vocab, (streams, arguments.prompt), device=arguments.device)
        first = torch.arange(arguments.prompt, device=arguments.device)
        logits = model(ids, past_key_values=cache, cache_position=first, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        positions = iter(range(arguments.prompt, arguments.prompt + WARM_UP + arguments.new))

        def step(token):
            position = torch.tensor([next(positions)], device=arguments.device)
            logits = run(token, past_key_values=cache, cache_position=position, use_cache=True).logits
            # A copy: the next replay of a graph overwrites its results.
            return logits[:, -1].argmax(-1, keepdim=True).clone()

        for _ in range(WARM_UP):
            token = step(token)
        synchronize()
        began = time.perf_counter()
        for _ in range(arguments.new):
            token = step(token)
        synchronize()
        seconds = (time.perf_counter() - began) / arguments.new
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        return {"step_seconds": seconds, "peak_bytes": peak}

    result = {"side": f"transformers {transformers.__version__}, PyTorch {torch.__version__}"}
    for streams in arguments.streams:
        result[str(streams)] = decode(streams)
    return result


if __name__ == "__main__":
    main()
