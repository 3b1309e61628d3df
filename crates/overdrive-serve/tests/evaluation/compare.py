"""Runs lm_eval against a server and on the same model in transformers, and compares every score:
compare.py URL MODEL FOLDER [WINDOW]. URL ends in /v1, FOLDER has the model in f32, WINDOW is the length of the windows in
which long texts are scored."""

import json
import os
import sys
import tempfile

cache = tempfile.TemporaryDirectory()
os.environ.update(HF_HOME=cache.name, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import lm_eval
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

url, model, folder = sys.argv[1:4]
window = int(sys.argv[4]) if len(sys.argv) > 4 else 256
# The data files of the tasks are beside this script.
os.chdir(os.path.dirname(os.path.abspath(__file__)))
with open("rolling.jsonl") as lines:
    texts = [json.loads(line)["text"] for line in lines]
tasks = ["overdrive_choice", "overdrive_rolling", "overdrive_generation"]
tokenizer = AutoTokenizer.from_pretrained(folder)
# The rounding of the log-likelihood of an answer, and of each token of a text. In f32, the log-softmax of torch is off by
# up to 4e-5 with a vocabulary of 49,152, always in the same direction; the server adds in f64.
CLOSE = 1e-4


def run(kind, names, model_args, **options):
    manager = TaskManager(include_path=".", include_defaults=False)
    return lm_eval.simple_evaluate(model=kind, model_args=model_args, tasks=list(names), task_manager=manager,
                                   log_samples=True, bootstrap_iters=0, verbosity="ERROR", **options)


def answers(result, task):
    samples = sorted(result["samples"][task], key=lambda sample: sample["doc_id"])
    return [response[0] for sample in samples for response in sample["resps"]]


def compare(what, result, reference, names):
    """Compares the scores of all samples and the metrics."""
    largest = {}
    for task in names:
        ours, theirs = answers(result, task), answers(reference, task)
        assert len(ours) == len(theirs) > 0, (what, task)
        for number, (own, other) in enumerate(zip(ours, theirs)):
            tokens = 1
            if task == "overdrive_generation":
                assert own == other, (what, task, own, other)
                continue
            if task == "overdrive_choice":
                (own, own_greedy), (other, other_greedy) = own, other
                assert own_greedy == other_greedy, (what, task)
            else:
                tokens = len(tokenizer(texts[number]).input_ids)
            difference = abs(own - other)
            largest[task] = max(largest.get(task, 0), difference)
            assert difference < CLOSE * tokens, (what, task, own, other)
        for metric, value in reference["results"][task].items():
            if isinstance(value, float):
                own = result["results"][task][metric]
                assert abs(own - value) <= CLOSE * abs(value), (what, task, metric, own, value)
    differences = "".join(f"; {task}: {difference:.1e}" for task, difference in largest.items())
    print(f"{what} agrees{differences and '; largest differences of log-likelihoods' + differences}")


reference = run("hf", tasks, dict(pretrained=folder, dtype="float32", device="cpu", max_length=window), batch_size=1)
for task in tasks:
    metrics = {name: value for name, value in reference["results"][task].items() if isinstance(value, float)}
    print(task, metrics)
# One token more for the context of a window and one for the answer, which these models count in their length.
server = dict(model=model, base_url=f"{url}/completions", max_length=window + 2, max_retries=1)
for what, more, options in (
    ("the server's tokenizer", {}, {}),
    ("a local tokenizer", dict(tokenizer=folder, tokenizer_backend="huggingface"), {}),
    ("prompts in batches", {}, dict(batch_size=5)),
    ("requests at once", dict(num_concurrent=4), {}),
    ("prompts as texts", dict(tokenized_requests=False), {}),
):
    compare(what, run("local-completions", tasks, server | more, **options), reference, tasks)

chats = ["overdrive_choice", "overdrive_generation"]
reference = run("hf", chats, dict(pretrained=folder, dtype="float32", device="cpu"), batch_size=1,
                apply_chat_template=True)
# lm_eval applies templates itself, and only those of a local tokenizer.
local = server | dict(tokenizer=folder, tokenizer_backend="huggingface")
compare("completions of chats", run("local-completions", chats, local, apply_chat_template=True), reference, chats)
generation = ["overdrive_generation"]
chat = server | dict(base_url=f"{url}/chat/completions")
compare("chat", run("local-chat-completions", generation, chat, apply_chat_template=True), reference, generation)
print("all scores agree with lm_eval", lm_eval.__version__)
