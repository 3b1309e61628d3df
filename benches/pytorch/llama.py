"""The baseline: a Llama in plain PyTorch, as fast as eager PyTorch is written.

The layers are those of overdrive-transformer's Llama: RMSNorm through `F.rms_norm`, rotary positions,
`F.scaled_dot_product_attention` with `is_causal`, SwiGLU, untied or tied head; fused AdamW.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Shape:
    vocab: int
    dim: int
    layers: int
    heads: int
    hidden: int
    context: int = 256
    batch: int = 8
    tied: bool = True
    # The number of key/value heads; 0 for as many as heads.
    kv_heads: int = 0


PRESETS = {
    "tiny": Shape(vocab=4096, dim=256, layers=6, heads=4, hidden=688),
    "small": Shape(vocab=8192, dim=384, layers=6, heads=6, hidden=1024),
}


def rotary(context: int, head_dim: int, theta: float = 10000.0) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(context).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Norm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class Block(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.heads, self.head_dim = s.heads, s.dim // s.heads
        self.kv_heads = s.kv_heads or s.heads
        self.attention_norm, self.mlp_norm = Norm(s.dim), Norm(s.dim)
        self.q, self.o = (nn.Linear(s.dim, s.dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(s.dim, self.kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(s.dim, s.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(s.hidden, s.dim, bias=False)

    def attention(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)

    def activation(self, gate, up):
        return F.silu(gate) * up

    def forward(self, x, cos, sin):
        batch, time, dim = x.shape
        h = self.attention_norm(x)
        split = lambda t: t.view(batch, time, -1, self.head_dim).transpose(1, 2)
        q, k, v = split(self.q(h)), split(self.k(h)), split(self.v(h))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = self.attention(q, k, v)
        x = x + self.o(a.transpose(1, 2).reshape(batch, time, dim))
        h = self.mlp_norm(x)
        return x + self.down(self.activation(self.gate(h), self.up(h)))


class Llama(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.embed = nn.Embedding(s.vocab, s.dim)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = Norm(s.dim)
        self.head = nn.Linear(s.dim, s.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        if s.tied:
            self.head.weight = self.embed.weight
        cos, sin = rotary(s.context, s.dim // s.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.loss(self.norm(x), labels)

    def loss(self, hidden, labels):
        logits = self.head(hidden)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1))


# The names of a block's parameters here, and in the files of Hugging Face.
NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def load_trained(model: Llama, folder: str) -> list[torch.Tensor]:
    """Loads the weights of a folder that Overdrive's train_step --save wrote, and returns its batches (B, T + 1)."""
    from safetensors.torch import load_file

    stored = load_file(f"{folder}/model.safetensors")
    state = {"embed.weight": stored["model.embed_tokens.weight"], "norm.weight": stored["model.norm.weight"]}
    state["head.weight"] = state["embed.weight"]
    for at in range(len(model.blocks)):
        for ours, theirs in NAMES.items():
            state[f"blocks.{at}.{ours}.weight"] = stored[f"model.layers.{at}.{theirs}.weight"]
    model.load_state_dict(state)
    return list(load_file(f"{folder}/batches.safetensors")["tokens"])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    plain = [p for n, p in model.named_parameters() if p.dim() <= 1 or "embed" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), fused=True)
