"""llama.cpp's server for compare.py, from the Python package xllamacpp, which ships it compiled.

    python3 llama_cpp.py MODEL.gguf PORT [--threads N] [--slots 8] [--context 2048]

Defaults are llama-server's own except for what the other server is given too: the number of threads (all cores),
the sequences that run at once, and the context of each.
"""

import argparse
import os
import signal
import threading

import xllamacpp


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    arguments = parser.parse_args()
    # Python's imports are not llama.cpp's.
    print("start", flush=True)
    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.hostnames = ["127.0.0.1"]
    params.port = arguments.port
    params.n_parallel = arguments.slots
    params.n_ctx = arguments.slots * arguments.context
    params.cpuparams.n_threads = arguments.threads
    params.cpuparams_batch.n_threads = arguments.threads
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    end.wait()


if __name__ == "__main__":
    main()
