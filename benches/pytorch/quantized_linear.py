"""Times PyTorch's dynamic INT8 linear map (fbgemm) and the dense one. Prints one JSON line a product; the
Rust side is benches/quantized_linear.rs.

python3 quantized_linear.py --sizes 4096x4096,11008x4096 --rows 1,8,64,512 --threads 2
"""

import argparse
import json
import time

import torch


def fastest(run, seconds: float) -> float:
    """The least of many short runs: others on the machine make some longer."""
    least, count, begin = float("inf"), 0, time.perf_counter()
    while count < 5 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - start)
        count += 1
    return least


def processor(run, seconds: float) -> float:
    """The mean processor time of this thread: what to look at while others use the machine."""
    run()
    count, begin = 0, time.thread_time()
    while count < 5 or time.thread_time() - begin < seconds:
        run()
        count += 1
    return (time.thread_time() - begin) / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="4096x4096,11008x4096", help="outputs x inputs")
    parser.add_argument("--rows", default="1,8,64,512")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--engine", default=None, help="fbgemm, x86, onednn or qnnpack")
    parser.add_argument("--seconds", type=float, default=0.6, help="of runs for each product")
    parser.add_argument("--processor", action="store_true", help="one thread, by its processor time")
    arguments = parser.parse_args()
    timed = processor if arguments.processor else fastest
    if arguments.processor:
        torch.set_num_threads(1)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.engine:
        torch.backends.quantized.engine = arguments.engine
    torch.manual_seed(0)
    for size in arguments.sizes.split(","):
        outputs, inputs = (int(n) for n in size.split("x"))
        dense = torch.nn.Linear(inputs, outputs, bias=False)
        model = torch.nn.Sequential(dense)
        quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
        low = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        for rows in (int(n) for n in arguments.rows.split(",")):
            x = torch.randn(rows, inputs)
            with torch.no_grad():
                line = {
                    "side": f"PyTorch {torch.__version__}",
                    "engine": torch.backends.quantized.engine,
                    "threads": torch.get_num_threads(),
                    "size": size,
                    "rows": rows,
                    "int8_ms": timed(lambda: quantized(x), arguments.seconds) * 1e3,
                    "float_ms": timed(lambda: dense(x), arguments.seconds) * 1e3,
                    "bfloat16_ms": timed(lambda: low(x.bfloat16()), arguments.seconds) * 1e3,
                }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
