"""Logits of Hugging Face folders for given tokens, by transformers.

    python3 reference.py TOKENS.safetensors OUTPUT.safetensors FOLDER...

TOKENS holds `ids` (batch, length); OUTPUT gets the logits of each folder under its name. Written for
torch 2.11 and transformers 5; fp32, eager.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

tokens, output, *folders = map(Path, sys.argv[1:])
ids = load_file(tokens)["ids"]
found = {}
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found[folder.name] = model(ids).logits.contiguous()
save_file(found, output)
