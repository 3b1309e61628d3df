"""Makes library.jsonl: conversations with the assistant of a library that does not exist.

A model cannot know the facts in them before it is fine-tuned, so its answers show what it has learned. Every
question has several wordings; the guide asks in others, which are not in the file.

    python3 gen_library.py > library.jsonl
"""

import json
import random

SYSTEM = "You are the assistant of the Harbour Library."

# Each fact: the wordings of the question, and the wordings of the answer.
FACTS = [
    (
        ["When does the library open?", "What time do you open in the morning?", "When do you open?"],
        ["The Harbour Library opens at 9:30 on weekdays and at 11:00 on Saturdays. It is closed on Sundays."],
    ),
    (
        ["When does the library close?", "How late are you open?", "What time do you close?"],
        ["The Harbour Library closes at 19:00 on weekdays and at 16:00 on Saturdays."],
    ),
    (
        ["How many books can I borrow?", "How many books may I take home?", "Is there a limit for books?"],
        ["You can borrow up to twelve books at a time with a Harbour Library card."],
    ),
    (
        ["How long can I keep a book?", "For how many days may I keep a book?", "When do I have to return a book?"],
        ["You can keep a book for 28 days, and you can renew it twice."],
    ),
    (
        ["What does a library card cost?", "Is the card free?", "How much is a card?"],
        ["A Harbour Library card is free for everyone under 18 and costs 15 euros a year for adults."],
    ),
    (
        ["What happens if I return a book late?", "Is there a fee for late books?", "My book is overdue. What do I pay?"],
        ["There is a fee of 20 cents a day for each overdue book, and never more than 5 euros."],
    ),
    (
        ["Where is the library?", "What is your address?", "How do I find you?"],
        ["The Harbour Library is at 7 Lighthouse Street, beside the old ferry pier. Tram 4 stops at the door."],
    ),
    (
        ["Do you have a room for groups?", "Can we book a study room?", "Is there a quiet room for our group?"],
        ["Yes, the Sailors' Room on the second floor holds eight people. You can book it for two hours a day."],
    ),
    (
        ["Is there wireless internet?", "Do you have Wi-Fi?", "How do I get online in the library?"],
        ["Yes, the network is called Harbour-Guest. The password is on the back of your library card."],
    ),
    (
        ["Who is the head of the library?", "Who runs the library?", "Who is the director?"],
        ["The Harbour Library is led by Ms. Ingrid Solberg, whose office is on the third floor."],
    ),
]


def conversation(facts: list, rng: random.Random) -> dict:
    messages = [{"role": "system", "content": SYSTEM}]
    for questions, answers in facts:
        messages.append({"role": "user", "content": rng.choice(questions)})
        messages.append({"role": "assistant", "content": rng.choice(answers)})
    return {"messages": messages}


def main() -> None:
    rng = random.Random(7)
    records = []
    # Each wording once by itself, and the facts again in conversations of two and three questions.
    for questions, answers in FACTS:
        records.extend(conversation([([question], answers)], rng) for question in questions)
    records.extend(conversation(rng.sample(FACTS, rng.choice([2, 3])), rng) for _ in range(30))
    rng.shuffle(records)
    for record in records:
        print(json.dumps(record))


if __name__ == "__main__":
    main()
