"""Checks exported graphs with onnx.checker and ONNX Runtime against what Overdrive computed.

    python3 check_onnx.py FOLDER

FOLDER holds a folder for each case: `model.onnx`, `expected.npz` and `case.json`, which the Rust tests
`onnx_runtime.rs` write. Needs onnx (1.21 or later for all opsets; run with 1.23.2), onnxruntime (run with
1.31.1) and numpy. Prints a line for each case and fails at the first that does not hold.

What is checked of a case:

* `onnx.checker.check_model` with full shape inference, for the file on the disk with its external data;
* each scene of `expected.npz` (`{scene}.input_ids`, `.attention_mask`, `.position_ids`, `.logits`): logits at
  unmasked positions within `tolerance`, relative to the largest logit where it is more than 1;
* with a cache, the same scenes fed in two parts and token by token (batches in two parts only where
  `batches_continue`: GroupQueryAttention takes several tokens after others for one row alone);
* `greedy.tokens`: the same tokens by greedy generation through the cache, with padding on the left.

Tolerances are in `case.json`: 1e-4 in fp32, where both sides add in another order; more for fp16 and for
activations in 8 bits, which the case says.
"""

import json
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime


def session(path, spec):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    # On processors with AVX2 and without VNNI, sums of two products of bytes saturate at 16 bits, unless this is set.
    options.add_session_config_entry("session.x64quantprecision", "1")
    if spec["exact_products"]:
        # ONNX Runtime rounds activations to 8 bits before products with weights of 8 bits, unless it is told
        # to multiply floats.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def empty_past(runtime, batch):
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    return {
        value.name: np.zeros((batch, value.shape[1], 0, value.shape[3]), kinds[value.type])
        for value in runtime.get_inputs()
        if value.name.startswith("past_key_values.")
    }


def step(runtime, ids, mask, positions, past):
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}
    names = [value.name for value in runtime.get_outputs()]
    results = dict(zip(names, runtime.run(names, feeds)))
    new = {name.replace("present.", "past_key_values."): value for name, value in results.items() if name != "logits"}
    return results["logits"], new


def in_parts(runtime, ids, mask, positions, bounds):
    past, parts = empty_past(runtime, len(ids)), []
    for start, end in zip([0, *bounds], [*bounds, ids.shape[1]]):
        logits, past = step(runtime, ids[:, start:end], mask[:, :end], positions[:, start:end], past)
        parts.append(logits)
    return np.concatenate(parts, 1)


def difference(found, expected, mask):
    assert found.shape == expected.shape, (found.shape, expected.shape)
    real = mask[:, -found.shape[1] :].astype(bool)
    scale = max(1.0, float(np.abs(expected[real]).max()))
    return float(np.abs(found - expected)[real].max()) / scale


def greedy(runtime, ids, mask, positions, count):
    past, tokens = empty_past(runtime, len(ids)), []
    for _ in range(count):
        logits, past = step(runtime, ids, mask, positions, past)
        ids = logits[:, -1].argmax(-1)[:, None].astype(np.int64)
        mask = np.concatenate([mask, np.ones_like(ids)], 1)
        positions = positions[:, -1:] + 1
        tokens.append(ids)
    return np.concatenate(tokens, 1)


def check(folder):
    spec = json.loads((folder / "case.json").read_text())
    path = str(folder / "model.onnx")
    onnx.checker.check_model(path, full_check=True)
    expected = np.load(folder / "expected.npz")
    runtime = session(path, spec)
    worst = 0.0
    for scene in spec["scenes"]:
        ids, mask, positions, logits = (
            expected[f"{scene}.{part}"] for part in ("input_ids", "attention_mask", "position_ids", "logits")
        )
        past = empty_past(runtime, len(ids))
        found, _ = step(runtime, ids, mask, positions, past)
        differences = {"whole": difference(found, logits, mask)}
        if spec["parts"]:
            tokens = ids.shape[1]
            if tokens > 1 and (len(ids) == 1 or spec["batches_continue"]):
                halves = in_parts(runtime, ids, mask, positions, [tokens // 2])
                differences["halves"] = difference(halves, logits, mask)
            one_by_one = in_parts(runtime, ids, mask, positions, list(range(1, tokens)))
            differences["one by one"] = difference(one_by_one, logits, mask)
        for way, found in differences.items():
            # Not `>`: a NaN must fail.
            assert found <= spec["tolerance"], f"{folder.name}: {scene}, {way}: {found:.2e} > {spec['tolerance']}"
            worst = max(worst, found)
    agreed = "no greedy"
    if "greedy.tokens" in expected:
        ids, mask, positions, tokens = (
            expected[f"greedy.{part}"] for part in ("input_ids", "attention_mask", "position_ids", "tokens")
        )
        found = greedy(runtime, ids, mask, positions, tokens.shape[1])
        assert (found == tokens).all(), f"{folder.name}: greedy {found.tolist()} is not {tokens.tolist()}"
        agreed = f"{tokens.size} greedy tokens equal"
    print(f"{folder.name:32} within {worst:.1e} of {spec['tolerance']:.0e}, {agreed}")


for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    check(folder)
