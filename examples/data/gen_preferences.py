"""Questions about small sums with a preferred and another answer, as preference data to try `dpo` with.

Run: python3 gen_preferences.py   (no packages needed)

Writes preferences.jsonl: 160 records with `prompt`, `chosen` and `rejected`. The questions and the preferred answers are
made as those of arithmetic.jsonl, so that a model that was fine-tuned on it writes answers of this kind; the other answer is
evasive, has no sentence, or has another number in it. Seeded: the file is the same on every machine.
"""

import json
import random
import re
from pathlib import Path

from gen_arithmetic import record

EVASIVE = [" I am not sure.", " That is hard to say.", " Please ask somebody else."]


def rejected(answer, random_numbers):
    numbers = re.findall(r"\d+", answer)
    kind = random_numbers.choice(["evasive", "bare", "wrong"])
    if kind == "evasive":
        return random_numbers.choice(EVASIVE)
    if kind == "bare" or not numbers:
        return f" {answer.split()[-1].rstrip('.')}"
    wrong = str(int(numbers[-1]) + random_numbers.choice([-3, -1, 1, 2, 10]))
    return wrong.join(answer.rsplit(numbers[-1], 1))


def main():
    random_numbers = random.Random(11)
    seen, lines = set(), []
    while len(lines) < 160:
        one = record(random_numbers)
        if one["prompt"] in seen:
            continue
        seen.add(one["prompt"])
        answer = one["response"]
        pair = {"prompt": one["prompt"], "chosen": answer, "rejected": rejected(answer, random_numbers)}
        lines.append(json.dumps(pair))
    (Path(__file__).parent / "preferences.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
