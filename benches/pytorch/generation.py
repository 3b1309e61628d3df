"""Times generation by transformers. Prints one JSON line; see compare_generation.py, which runs both sides.

python3 generation.py --model DIR --threads 2
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

# The table of ../src/generation.rs, less what takes minutes here: name, streams, tokens of a prompt, new tokens, cache.
CASES = [
    ("prefill", 1, 512, 1, True),
    ("one_stream", 1, 32, 128, True),
    ("eight_streams", 8, 32, 128, True),
    ("cached", 1, 1, 100, True),
    ("uncached", 1, 1, 100, False),
    ("long_prompt", 1, 1024, 64, True),
]


class Clock(transformers.LogitsProcessor):
    """Notes when the scores of each step are there: the first marks the end of prefill."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids, scores):
        self.times.append(time.perf_counter())
        return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--case", help="one case instead of all")
    parser.add_argument("--quantize-dynamic", action="store_true", help="INT8 linear layers, the head too")
    parser.add_argument("--prompt-ids", help="JSON file with the tokens of a text for the prompts")
    parser.add_argument("--flush-denormals", action="store_true", help="torch.set_flush_denormal(True)")
    arguments = parser.parse_args()
    # It reaches this thread. The others get it because they start later.
    if arguments.flush_denormals and not torch.set_flush_denormal(True):
        raise SystemExit("this processor cannot flush denormals")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    vocabulary = model.config.vocab_size
    parameters = sum(p.numel() for p in model.parameters())
    if arguments.quantize_dynamic:
        torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    text = json.loads(Path(arguments.prompt_ids).read_text()) if arguments.prompt_ids else None
    line = {
        "side": f"transformers {transformers.__version__} on PyTorch {torch.__version__}",
        "parameters": parameters,
        "threads": torch.get_num_threads(),
    }
    for name, streams, prompt, new, use_cache in CASES:
        if arguments.case not in (None, name):
            continue
        if text:
            ids = torch.tensor([text[16 * row : 16 * row + prompt] for row in range(streams)])
        else:
            ids = torch.tensor(
                [[(row * 7919 + place * 104729 + 13) % vocabulary for place in range(prompt)] for row in range(streams)]
            )
        prefills, decodes = [], []
        for _ in range(1 if name == "uncached" else arguments.runs):
            clock = Clock()
            start = time.perf_counter()
            with torch.inference_mode():
                output = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new,
                    do_sample=False,
                    use_cache=use_cache,
                    pad_token_id=0,
                    eos_token_id=None,
                    logits_processor=[clock],
                )
            end = time.perf_counter()
            prefills.append(streams * prompt / (clock.times[0] - start))
            if new > 1:
                decodes.append(streams * (new - 1) / (end - clock.times[0]))
        line[name] = {
            "prefill": statistics.median(prefills),
            "decode": statistics.median(decodes) if decodes else 0.0,
            "tokens": output[0, prompt:].tolist(),
        }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
