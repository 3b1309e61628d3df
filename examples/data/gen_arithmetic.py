"""Questions about small sums and their answers, as instruction data to try fine-tuning with.

Run: python3 gen_arithmetic.py   (no packages needed)

Writes arithmetic.jsonl: 240 records with `prompt` and `response`, in five wordings. The prompts end with
a line for the answer, because a base model has no chat template: it is asked in the words it learned
with. The space before an answer belongs to the answer, as it does to its first token. Seeded: the file is the same on every machine.
"""

import json
import random
from pathlib import Path

WORDINGS = [
    ("What is {a} plus {b}?", "+", "{a} plus {b} is {c}."),
    ("What is {a} minus {b}?", "-", "{a} minus {b} is {c}."),
    ("What is {a} times {b}?", "*", "{a} times {b} is {c}."),
    ("Which is larger, {a} or {b}?", "max", "{c} is larger than {d}."),
    ("Is {a} even or odd?", "even", "{a} is {c}."),
]


def record(random_numbers):
    question, operation, answer = random_numbers.choice(WORDINGS)
    a = random_numbers.randrange(2, 50)
    b = random_numbers.choice([n for n in range(2, 50) if n != a])
    if operation == "*":
        a, b = a % 10 + 2, b % 10 + 2
    results = {
        "+": a + b,
        "-": a - b,
        "*": a * b,
        "max": max(a, b),
        "even": "even" if a % 2 == 0 else "odd",
    }
    values = {"a": a, "b": b, "c": results[operation], "d": min(a, b)}
    return {
        "prompt": f"// Question: {question.format(**values)}\n// Answer:",
        "response": " " + answer.format(**values),
    }


def main():
    random_numbers = random.Random(7)
    seen, lines = set(), []
    while len(lines) < 240:
        one = record(random_numbers)
        if one["prompt"] not in seen:
            seen.add(one["prompt"])
            lines.append(json.dumps(one))
    (Path(__file__).parent / "arithmetic.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
