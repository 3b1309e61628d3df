"""Times one variant of PyTorch's training step for `cargo xtask gpu-check`, and prints one JSON line.

The model is the Llama of llama.py in mixed precision: fp32 weights, autocast to bf16, fused AdamW, clipping.

python3 gpu_step.py --variant compile --device cuda
"""

import argparse
import json
import statistics
import time

import torch

from llama import Llama, Shape, optimizer_of


class Missing(Exception):
    """A package of the variant that this Python lacks."""


def imported(name: str):
    try:
        return __import__(name, fromlist=["*"])
    except Exception as error:  # a package may also fail to load its libraries
        raise Missing(f"{name} cannot be imported: {error}") from error


def with_liger(model: Llama) -> None:
    """Replaces norms, gates and the loss by Liger's kernels."""
    norm = imported("liger_kernel.transformers.rms_norm").LigerRMSNorm
    gate = imported("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    loss = imported("liger_kernel.transformers.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyLoss()

    def replaced(old) -> torch.nn.Module:
        new = norm(old.weight.numel(), eps=1e-5).to(old.weight.device)
        new.weight = old.weight
        return new

    for block in model.blocks:
        block.attention_norm, block.mlp_norm = replaced(block.attention_norm), replaced(block.mlp_norm)
        block.activation = gate.apply
    model.norm = replaced(model.norm)
    model.loss = lambda hidden, labels: loss(model.head.weight, hidden.view(-1, hidden.size(-1)), labels.reshape(-1))


def with_flash_attn(model: Llama) -> None:
    """Replaces PyTorch's attention by that of the package flash-attn."""
    function = imported("flash_attn").flash_attn_func

    def attention(q, k, v):
        q, k, v = (x.transpose(1, 2).to(torch.bfloat16) for x in (q, k, v))
        return function(q, k, v, causal=True).transpose(1, 2)

    for block in model.blocks:
        block.attention = attention


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=["eager", "compile", "liger", "flash-attn", "adamw-8bit"], default="eager")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--seconds", type=float, default=120.0, help="measures fewer steps when this time is over")
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
    arguments = parser.parse_args()
    try:
        result = measure(arguments)
    except Missing as missing:
        result = {"missing": str(missing)}
    print(json.dumps(result))


def measure(arguments) -> dict:
    began = time.perf_counter()
    torch.manual_seed(0)
    shape = Shape(
        vocab=arguments.vocab,
        dim=arguments.dim,
        layers=arguments.layers,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        hidden=arguments.hidden,
        context=arguments.context,
        batch=arguments.batch,
    )
    on_gpu = arguments.device == "cuda"
    with torch.device(arguments.device):
        model = Llama(shape)
    if arguments.variant == "liger":
        with_liger(model)
    if arguments.variant == "flash-attn":
        with_flash_attn(model)
    if arguments.variant == "adamw-8bit":
        optimizer = imported("bitsandbytes").optim.AdamW8bit(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    else:
        optimizer = optimizer_of(model)
    run = torch.compile(model) if arguments.variant == "compile" else model
    ids = torch.randint(shape.vocab, (shape.batch, shape.context + 1), device=arguments.device)

    def step() -> torch.Tensor:
        # The CPU is there to test this program; its bf16 may be emulated.
        with torch.autocast(arguments.device, dtype=torch.bfloat16, enabled=on_gpu):
            loss = run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    loss = step().item()
    synchronize()
    if on_gpu:
        # The warm-up may have taken more, above all a compiler's trials.
        step()
        synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    while len(seconds) < 8 and (not seconds or time.perf_counter() - began < arguments.seconds):
        start = time.perf_counter()
        loss = step().item()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "side": f"PyTorch {torch.__version__}, {len(seconds)} steps",
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_seconds": statistics.median(seconds),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "loss": loss,
    }


if __name__ == "__main__":
    main()
