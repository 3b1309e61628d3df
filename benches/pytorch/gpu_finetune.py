"""Times a step of QLoRA by PEFT and bitsandbytes for `cargo xtask gpu-check`, and prints one JSON line.

The model is transformers' Llama with random weights: its linear layers but the head are NF4 with double quantization, and
each has an adapter. bf16 by autocast, fused AdamW, clipping, no checkpoints, as on the other side.

python3 gpu_finetune.py --device cuda --rank 16
"""

import argparse
import json
import statistics
import time

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--seconds", type=float, default=120.0, help="measures fewer steps when this time is over")
    parser.add_argument("--rank", type=int, default=16)
    for name, default in [
        ("vocab", 128_256),
        ("dim", 4096),
        ("layers", 32),
        ("heads", 32),
        ("kv-heads", 8),
        ("hidden", 14_336),
        ("context", 2048),
        ("batch", 2),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    print(json.dumps(measure(parser.parse_args())))


def measure(arguments) -> dict:
    began = time.perf_counter()
    try:
        import bitsandbytes
        import peft
        import torch
        import transformers
    except Exception as error:  # a package may also fail to load its libraries
        return {"missing": f"a package cannot be imported: {error}"}
    torch.manual_seed(0)
    on_gpu = arguments.device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    config = transformers.LlamaConfig(
        vocab_size=arguments.vocab,
        hidden_size=arguments.dim,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        intermediate_size=arguments.hidden,
        max_position_embeddings=arguments.context,
        tie_word_embeddings=False,
        use_cache=False,
    )
    kind = torch.bfloat16 if on_gpu else torch.float32
    # In 16 bits on the device from the start: nothing of it is on the host.
    torch.set_default_dtype(kind)
    with torch.device(arguments.device):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name in LAYERS:
                if hasattr(part, name):
                    setattr(part, name, quantized(bitsandbytes, getattr(part, name), kind))
    # What `from_pretrained` with a quantization_config sets, and PEFT looks at.
    model.is_loaded_in_4bit = True
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    lora = peft.LoraConfig(r=arguments.rank, lora_alpha=arguments.rank, target_modules=LAYERS, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3, fused=True)
    ids = torch.randint(arguments.vocab, (arguments.batch, arguments.context), device=arguments.device)

    def step() -> float:
        with torch.autocast(arguments.device, dtype=torch.bfloat16, enabled=on_gpu):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model.train()
    loss = step()
    synchronize()
    if on_gpu:
        # The dense weights are gone.
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    while len(seconds) < 4 and (not seconds or time.perf_counter() - began < arguments.seconds * 0.8):
        start = time.perf_counter()
        loss = step()
        synchronize()
        seconds.append(time.perf_counter() - start)
    versions = f"PEFT {peft.__version__}, bitsandbytes {bitsandbytes.__version__}, PyTorch {torch.__version__}"
    return {
        "side": f"{versions}, {len(seconds)} steps",
        "step_seconds": statistics.median(seconds),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "loss": loss,
    }


def quantized(bitsandbytes, layer, kind):
    """Returns the layer with its weight in NF4."""
    new = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=kind, quant_type="nf4", compress_statistics=True
    )
    weight = layer.weight.data
    parameter = bitsandbytes.nn.Params4bit(
        weight,
        requires_grad=False,
        quant_type="nf4",
        compress_statistics=True,
        module=new,
    )
    # The transfer quantizes, also on the device where it is already.
    new.weight = parameter.to(weight.device)
    return new


if __name__ == "__main__":
    main()
