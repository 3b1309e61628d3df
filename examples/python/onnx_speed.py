"""Continues a prompt greedily with an exported model in ONNX Runtime and prints one JSON line: tokens a
second of prefill and decode, and the new tokens. `export_onnx --compare` runs it.

    python3 onnx_speed.py --model DIR/model.onnx --prompt-ids 1,2,3 --new 64 --threads 2

Needs onnxruntime (run with 1.31.1) and numpy. The cache goes from step to step as ONNX Runtime's own values,
without copies through numpy.
"""

import argparse
import json
import time

import numpy as np
import onnxruntime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt-ids", required=True)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = arguments.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    runtime = onnxruntime.InferenceSession(arguments.model, options, providers=["CPUExecutionProvider"])
    prompt = np.array([[int(number) for number in arguments.prompt_ids.split(",")]], np.int64)
    # The second run counts: the first one takes memory and starts threads.
    generate(runtime, prompt, min(arguments.new, 4))
    print(json.dumps(generate(runtime, prompt, arguments.new)))


def generate(runtime, ids, new):
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    past = {
        own.name: value(np.zeros((1, own.shape[1], 0, own.shape[3]), kinds[own.type]))
        for own in runtime.get_inputs()
        if own.name.startswith("past_key_values.")
    }
    names = [own.name for own in runtime.get_outputs()]
    tokens, length, times = [], 0, []
    for _ in range(new):
        start = time.perf_counter()
        count = ids.shape[1]
        feeds = {
            "input_ids": value(ids),
            "attention_mask": value(np.ones((1, length + count), np.int64)),
            "position_ids": value(np.arange(length, length + count, dtype=np.int64)[None]),
            **past,
        }
        results = dict(zip(names, runtime.run_with_ort_values(names, feeds)))
        token = int(results.pop("logits").numpy()[0, -1].argmax())
        past = {name.replace("present.", "past_key_values."): result for name, result in results.items()}
        times.append(time.perf_counter() - start)
        tokens.append(token)
        length += count
        ids = np.array([[token]], np.int64)
    prompt = length - (new - 1)
    return {"prefill": prompt / times[0], "decode": (new - 1) / max(sum(times[1:]), 1e-9), "tokens": tokens}


if __name__ == "__main__":
    main()
