"""Compiles a Hugging Face folder ahead of time into a package (`.pt2`) that overdrive-packages runs.

    python3 compile_package.py --model FOLDER --output FILE.pt2 [--models logits,prefill,decode]

Needs torch of the same version as the program's libtorch (2.11.0 or 2.13.0: a package runs on no other
version), transformers 5 and a C++ compiler. The folder holds config.json and model.safetensors, as
`CausalLm::save_pretrained` or the trainer writes them. It compiles through `torch.export` and
AOTInductor, so the machine that runs the package needs neither Python nor a compiler.

The models of a package have a dynamic `batch` and, except `decode`, a dynamic `length`:

    logits    input_ids (batch, length) -> logits (batch, length, vocabulary)
    prefill   input_ids (batch, length), positions (length,), keys_0.., values_0.. of
              (batch, heads, max_len, head_dim) each -> logits (batch, 1, vocabulary) of the last token;
              new keys and values are written to `positions` in keys_N and values_N
    decode    the same for one token in each row: input_ids (batch, 1), positions (1,)

The last two read and write the buffers of overdrive-kv-cache's `StaticCache` of the same `max_len`.
Constants have the names of the folder's weights. The metadata (key `overdrive`, JSON) records the
torch version, the dtypes and sizes of inputs and outputs, tied weights, and the instruction sets that
the code may use; overdrive-packages checks all of it before it loads any code.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch._inductor.package
from torch.export import Dim
from torch._inductor.package import package_aoti
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

FORMAT_VERSION = 1
KINDS = ("logits", "prefill", "decode")


class Slots(Cache):
    """A cache over the caller's tensors: writes at `positions` and returns its whole length."""

    def __init__(self, keys, values, positions):
        super().__init__(layers=[])
        self.slots, self.positions = (keys, values), positions

    def update(self, key_states, value_states, layer_idx, *_args, **_kwargs):
        for slots, new in zip(self.slots, (key_states, value_states)):
            slots[layer_idx].index_copy_(2, self.positions, new)
        return tuple(slots[layer_idx] for slots in self.slots)

    def get_seq_length(self, *_args, **_kwargs):
        return 0

    def get_max_cache_shape(self, *_args, **_kwargs):
        return self.slots[0][0].shape[2]


def with_forward(model, forward):
    """Replaces the model's `forward`; unlike a wrapper, this keeps the names of the parameters."""
    known = type(model)
    model.__class__ = type(known.__name__, (known,), {"forward": forward})
    return known


def all_logits(self, input_ids):
    return super(type(self), self).forward(input_ids=input_ids, use_cache=False).logits


def step(self, input_ids, positions, keys, values):
    columns = torch.arange(keys[0].shape[2], device=positions.device)
    seen = (columns <= positions[:, None])[None, None]
    return super(type(self), self).forward(
        input_ids=input_ids,
        attention_mask=torch.where(seen, 0.0, torch.finfo(keys[0].dtype).min).to(keys[0].dtype),
        position_ids=positions[None],
        past_key_values=Slots(keys, values, positions),
        use_cache=True,
        logits_to_keep=1,
    ).logits


def example(kind, config, arguments, dtype, device):
    """Returns example inputs of the model, and the names of the dynamic sizes."""
    tokens = 1 if kind == "decode" else 7
    ids = torch.arange(2 * tokens, device=device).reshape(2, tokens) % config.vocab_size
    sizes = {0: "batch"} if kind == "decode" else {0: "batch", 1: "length"}
    if kind == "logits":
        return (ids,), {"input_ids": sizes}
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (2, heads, arguments.max_length, head_dim)
    caches = [
        [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)] for _ in range(2)
    ]
    positions = torch.arange(tokens, device=device)
    dynamic = {
        "input_ids": sizes,
        "positions": {} if kind == "decode" else {0: "length"},
        "keys": [{0: "batch"}] * config.num_hidden_layers,
        "values": [{0: "batch"}] * config.num_hidden_layers,
    }
    return (ids, positions, *caches), dynamic


def leaves(names):
    """Yields the sizes of each input, with lists of inputs flattened."""
    for sizes in names.values():
        yield from sizes if isinstance(sizes, list) else [sizes]


def as_dynamic(names, most):
    """Returns the names in the form that torch.export takes."""

    def one(sizes):
        return {place: Dim.DYNAMIC(max=most[name]) for place, name in sizes.items()} or None

    return {key: [one(s) for s in sizes] if isinstance(sizes, list) else one(sizes) for key, sizes in names.items()}


def describe(program, names, most):
    """Returns inputs and outputs in the order of the compiled code, with dtypes and sizes."""
    signature = program.graph_signature
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    declared = list(leaves(names))
    symbols = {}
    for node, sizes in zip(signature.user_inputs, declared, strict=True):
        symbols |= {str(values[node].shape[place]): name for place, name in sizes.items()}

    def size(value):
        if isinstance(value, int):
            return value
        name = symbols.get(str(value))
        return {"name": name, "min": 1, "max": most[name]} if name else {"name": str(value)}

    def tensor(name, node):
        value = values[node]
        dtype = str(value.dtype).removeprefix("torch.")
        return {"name": name, "dtype": dtype, "shape": [size(s) for s in value.shape]}

    # The model writes to keys and values, which come after ids and positions.
    inputs = [tensor(node, node) | {"mutated": place >= 2} for place, node in enumerate(signature.user_inputs)]
    outputs = [tensor("logits", node) for node in signature.user_outputs]
    return inputs, outputs


def tied(model):
    """Returns groups of names of one tied weight; the compiled code uses one name of each group."""
    same = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        same.setdefault(tensor.data_ptr(), []).append(name)
    return [names for names in same.values() if len(names) > 1]


def processor_flags():
    """Returns the instruction sets that the compiler may use: AOTInductor compiles with -march=native."""
    compiler = os.environ.get("CXX", "g++")
    try:
        text = subprocess.run(
            [compiler, "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = (line.split() for line in text.splitlines())
    return [row[0].removeprefix("-m") for row in rows if len(row) == 2 and row[1] == "[enabled]"]


def compile_one(kind, model, arguments, dtype):
    inputs, names = example(kind, model.config, arguments, dtype, arguments.device)
    most = {"batch": arguments.max_batch, "length": arguments.max_length}
    known = with_forward(model, all_logits if kind == "logits" else step)
    try:
        with torch.no_grad():
            program = torch.export.export(model, inputs, dynamic_shapes=as_dynamic(names, most))
        described, results = describe(program, names, most)
        metadata = {
            "format_version": FORMAT_VERSION,
            "torch": torch.__version__.split("+")[0],
            "kind": kind,
            "model_type": model.config.model_type,
            "inputs": described,
            "outputs": results,
            "tied": tied(model),
            "swappable": not arguments.freeze,
            "processor": processor_flags() if arguments.device == "cpu" else [],
        }
        options = {
            "aot_inductor.package": True,
            "aot_inductor.metadata": {"overdrive": json.dumps(metadata)},
            # One row or one token runs the code for several; `check` below tests this for the model.
            "aot_inductor.check_lowerbound": False,
            # Use libtorch's number of threads at run time, not the number of this machine.
            "cpp.dynamic_threads": True,
            "max_autotune": arguments.max_autotune,
            "freezing": arguments.freeze,
        }
        with torch.no_grad():
            return torch._inductor.aot_compile(program.module(check_guards=False), inputs, options=options)
    finally:
        model.__class__ = known


def check(kind, package, model, arguments, dtype):
    """Compares the package with the model at sizes other than the example's, including one row and one token."""
    compiled = torch._inductor.package.load_package(str(package), kind)
    inputs, _ = example(kind, model.config, arguments, dtype, arguments.device)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    known = with_forward(model, all_logits if kind == "logits" else step)
    try:
        for batch, tokens in [(1, 1), (2, 1), (1, 5), (3, 9)]:
            tokens = 1 if kind == "decode" else min(tokens, arguments.max_length)
            ids = torch.randint(model.config.vocab_size, (batch, tokens), device=arguments.device)
            sides = []
            for run in (model, compiled):
                given = [ids]
                if kind != "logits":
                    caches = [[torch.zeros_like(t[:1]).repeat(batch, 1, 1, 1) for t in list_] for list_ in inputs[2:]]
                    given += [torch.arange(tokens, device=arguments.device), *caches]
                with torch.no_grad():
                    logits = run(*given)
                sides.append([logits, *sum(given[2:], [])])
            for eager, ours in zip(*sides, strict=True):
                torch.testing.assert_close(
                    ours, eager, rtol=tolerance, atol=tolerance, msg=lambda m: f"{kind}, {batch} x {tokens}: {m}"
                )
    finally:
        model.__class__ = known


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--output", type=Path, required=True, help="the package to write, FILE.pt2")
    parser.add_argument("--models", default="logits", help="a comma-separated list of logits, prefill, decode")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--max-length", type=int, help="tokens per row and in the cache (default: the model's context)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-autotune", action="store_true", help="benchmark kernels for matmuls (slow to compile)")
    parser.add_argument(
        "--freeze", action="store_true", help="pack the weights for this processor; they can then not be replaced"
    )
    arguments = parser.parse_args()
    if arguments.output.suffix != ".pt2":
        parser.error(f"--output is {arguments.output}; it must end in .pt2")
    kinds = arguments.models.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--models has {unknown[0]!r}; it must be a comma-separated list of {', '.join(KINDS)}")

    dtype = getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, attn_implementation="sdpa")
    model = model.to(arguments.device).eval().requires_grad_(False)
    if arguments.max_length is None:
        arguments.max_length = model.config.max_position_embeddings
    files = {kind: compile_one(kind, model, arguments, dtype) for kind in kinds}
    # Renamed once complete, so that nobody loads half a package. The archive's top folder has the file's name.
    with tempfile.TemporaryDirectory(dir=arguments.output.resolve().parent) as folder:
        made = package_aoti(str(Path(folder) / arguments.output.name), files)
        for kind in kinds:
            check(kind, made, model, arguments, dtype)
        os.replace(made, arguments.output)
    print(f"{arguments.output}: {', '.join(kinds)}, {arguments.output.stat().st_size / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
