"""Random lines of one file: Overdrive, PyTorch's DataLoader and Hugging Face datasets, in turn.

    python3 benches/pytorch/compare_data.py --rounds 3
    python3 benches/pytorch/compare_data.py --tokenize --rounds 3

Needs torch and datasets in the Python that runs it, and Rust. Without --file, a file of 10
million lines (540 MB) is written to the folder for temporary files. All sides read random lines of it
as text, by two workers, in batches of 32 and of 256 (small ones show what handing over a batch costs),
from the page cache. PyTorch's side is a Dataset over a list of offsets and a memory map, which is what one writes by
hand; datasets reads the file into Arrow once (not counted) and is read through a DataLoader with the
same workers, and directly. "index" is the time to find where all lines are.

With --tokenize, the lines of a file (by default the Rust source in Cargo's registry, at most 60 MB) become
tokens instead: Overdrive's token store on all cores beside datasets.map(num_proc), both with one byte-level BPE
of 8192 tokens that `tokenizers` trains on the file before. Writing the result counts on both sides.
"""

import argparse
import functools
import json
import mmap
import os
import random
import statistics
import subprocess
import tempfile
import time
from array import array
from pathlib import Path

from compare import ROOT, processor


class Lines:
    """Lines of a file, by a list of where they start."""

    def __init__(self, path: str):
        self.path = path
        self.map = None
        self.starts = array("Q", [0])
        at = 0
        with open(path, "rb") as file:
            for line in file:
                at += len(line)
                self.starts.append(at)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> str:
        if self.map is None:  # Each worker maps the file for itself.
            with open(self.path, "rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self.map[self.starts[index] : self.starts[index + 1] - 1].decode()


def write_lines(path: str, count: int) -> None:
    rng = random.Random(1)
    words = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=1 << 16))
    with open(path, "w") as file:
        for i in range(count):
            length = rng.randrange(22, 67)
            start = rng.randrange(len(words) - length)
            file.write(f"{i:08} {words[start:start + length]}\n")


def loader_samples(dataset, workers: int, batch_size: int, samples: int) -> float:
    """Samples a second, without the time in which the workers start."""
    from torch.utils.data import DataLoader

    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=workers, collate_fn=list)
    batches = iter(loader)
    given = len(next(batches))
    start, given = time.perf_counter(), 0
    for batch in batches:
        given += len(batch)
        if given >= samples:
            break
    return given / (time.perf_counter() - start)


def pytorch(path: str, workers: int, batch_size: int, samples: int) -> dict:
    start = time.perf_counter()
    lines = Lines(path)
    index = os.path.getsize(path) / 1e9 / (time.perf_counter() - start)
    return {
        "side": "PyTorch DataLoader",
        "index_gb_per_s": index,
        "index_bytes_per_record": 8.0,
        "loader_samples_per_s": loader_samples(lines, workers, batch_size, samples),
    }


def hugging_face(path: str, cache: str, workers: int, batch_size: int, samples: int) -> dict:
    import datasets

    datasets.disable_progress_bars()
    data = datasets.load_dataset("text", data_files=path, split="train", cache_dir=cache)
    order = random.Random(2)
    start, given = time.perf_counter(), 0
    while given < samples:
        given += len(data[[order.randrange(len(data)) for _ in range(batch_size)]]["text"])
    direct = given / (time.perf_counter() - start)
    return {
        "side": f"datasets {datasets.__version__}",
        "reads_per_s": direct,
        "loader_samples_per_s": loader_samples(data, workers, batch_size, samples),
    }


@functools.cache
def program(name: str) -> str:
    """The program of this name, built now."""
    command = ["cargo", "build", "--release", "--quiet", "-p", "overdrive-benches", "--bin", name]
    subprocess.run(command, check=True, cwd=ROOT)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return str(target / "release" / name)


def run(name: str, *arguments: object) -> dict:
    command = [program(name), *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def overdrive(path: str, workers: int, batch_size: int, samples: int) -> dict:
    return run("loader_speed", path, workers, batch_size, samples)


def write_source(path: str, limit: int) -> None:
    """The Rust files of Cargo's registry, one behind the other."""
    registry = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo")) / "registry" / "src"
    left = limit
    with open(path, "w") as out:
        for file in sorted(registry.glob("*/*/src/**/*.rs")):
            text = file.read_text(errors="ignore").replace("\r", "")
            left -= len(text)
            if left < 0:
                break
            out.write(text if text.endswith("\n") else text + "\n")


def train_tokenizer(path: str, out: str) -> None:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(path, vocab_size=8192, show_progress=False)
    tokenizer.save(out)


def overdrive_tokens(path: str, tokenizer: str, workers: int) -> dict:
    return run("tokenize_speed", path, tokenizer, workers)


def mapped_tokens(path: str, tokenizer_path: str, workers: int, cache: str) -> dict:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # num_proc processes are the threads.
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    tokenizer = Tokenizer.from_file(tokenizer_path)

    def encode(batch: dict) -> dict:
        encodings = tokenizer.encode_batch_fast(batch["text"])
        return {"ids": [encoding.ids for encoding in encodings]}

    data = datasets.load_dataset("text", data_files=path, split="train", cache_dir=cache)
    start = time.perf_counter()
    ids = data.map(
        encode, batched=True, num_proc=workers, remove_columns=["text"], load_from_cache_file=False
    )
    seconds = time.perf_counter() - start
    size = os.path.getsize(path) / 1e6
    tokens = sum(len(row) for batch in ids.iter(10_000) for row in batch["ids"])
    side = f"datasets {datasets.__version__}, num_proc={workers}"
    return {"side": side, "tokens": tokens, "text_mb": size, "mb_per_s": size / seconds}


def compare_tokens(arguments, folder: str) -> None:
    path = arguments.file or str(Path(folder) / "source.txt")
    if not arguments.file:
        write_source(path, 60_000_000)
    tokenizer = str(Path(folder) / "tokenizer.json")
    train_tokenizer(path, tokenizer)
    rounds = []
    for _ in range(arguments.rounds):
        ours = overdrive_tokens(path, tokenizer, arguments.workers)
        theirs = mapped_tokens(path, tokenizer, arguments.workers, str(Path(folder) / "arrow"))
        rounds.append([ours, theirs])
    print(f"{processor()}, {os.cpu_count()} cores; {arguments.workers} workers, {os.path.getsize(path) / 1e6:.1f} MB")
    ours = statistics.median(sides[0]["mb_per_s"] for sides in rounds)
    for number, side in enumerate(rounds[0]):
        speed = statistics.median(sides[number]["mb_per_s"] for sides in rounds)
        print(f"{side['side']:32} {side['tokens']:12,} tokens {speed:8.2f} MB/s {ours / speed:6.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", help="a text file instead of a generated one")
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--tokenize", action="store_true", help="tokens a second instead of lines a second")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.tokenize:
            compare_tokens(arguments, folder)
            return
        path = arguments.file or str(Path(folder) / "lines.txt")
        if not arguments.file:
            write_lines(path, arguments.lines)
        for batch_size in arguments.batch_sizes:
            load = (arguments.workers, batch_size, arguments.samples)
            sides = [
                lambda: overdrive(path, *load),
                lambda: pytorch(path, *load),
                lambda: hugging_face(path, str(Path(folder) / "arrow"), *load),
            ]
            results = [[side() for side in sides] for _ in range(arguments.rounds)]
            print(f"{processor()}, {os.cpu_count()} cores; {arguments.workers} workers, batches of {batch_size}")
            show(results)


def show(results: list) -> None:
    """The middle of the rounds of each side, and how many times as fast the first one's loader is."""

    def middle(side: int, key: str) -> float | None:
        values = [run[side][key] for run in results if key in run[side]]
        return statistics.median(values) if values else None

    def cell(value: float | None, form: str) -> str:
        return format(value, form) if value is not None else "-"

    print(f"{'':24} {'index GB/s':>12} {'B/record':>10} {'reads/s':>12} {'loader/s':>12} {'ratio':>7}")
    ours = middle(0, "loader_samples_per_s")
    for side, result in enumerate(results[0]):
        loader = middle(side, "loader_samples_per_s")
        cells = [
            f"{cell(middle(side, 'index_gb_per_s'), '.2f'):>12}",
            f"{cell(middle(side, 'index_bytes_per_record'), '.2f'):>10}",
            f"{cell(middle(side, 'reads_per_s'), ',.0f'):>12}",
            f"{loader:12,.0f} {ours / loader:6.1f}x",
        ]
        print(f"{result['side']:24}", *cells)


if __name__ == "__main__":
    main()
