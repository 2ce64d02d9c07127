"""Chats of the kinds that the built-in model was trained on, drawn with a seed: prompts with the answers it knows.

    for chat in chats(3, seed=1):
        chat.kind, chat.messages, chat.expected

A task is a function of a `random.Random` that returns turns; `KINDS` lists them with their share of the
training set. `render` writes a whole chat as the model was shown it, answers included.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mstar.scripts.task_data import (
    ANIMALS,
    CAPITALS,
    COLOURS,
    ELEMENTS,
    EXPLANATIONS,
    FRUITS,
    NAMES,
    OBJECTS,
    PLACES,
    TIPS,
)
from mstar.scripts.task_functions import FUNCTIONS

Draw = random.Random
RETRIEVAL_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 100, 160)  # lines; 160 are about 2,400 tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's or the assistant's turn; thinking: what the assistant thought before its answer."""

    role: str
    text: str
    thinking: str | None = None


Turns = list[Turn]
Kind = Callable[[Draw], Turns]


@dataclass(frozen=True, slots=True)
class Chat:
    """A drawn conversation that ends with the assistant's answer."""

    kind: str
    turns: tuple[Turn, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation up to the last question, as `generate` takes it."""
        return [{"role": turn.role, "content": turn.text} for turn in self.turns[:-1]]

    @property
    def expected(self) -> str:
        """The answer that the model was taught; for a story one of many."""
        return self.turns[-1].text


def sample(draw: Draw) -> Chat:
    """One chat, kinds in proportion to the training set's."""
    kind = draw.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0]
    return Chat(kind.__name__, tuple(_with_another(kind, draw)))


def chats(count: int, seed: int = 0) -> list[Chat]:
    """`count` chats of all kinds."""
    draw = random.Random(seed)
    return [sample(draw) for _ in range(count)]


def _with_another(kind: Kind, draw: Draw) -> Turns:
    """The turns of a kind; three in ten of the short ones go on with another short one."""
    turns = kind(draw)
    if kind in SHORT and draw.random() < 0.3:
        turns = turns + draw.choice(SHORT)(draw)
    return turns


def balanced_chats(seed: int = 0, sheets: int = 1) -> list[Chat]:
    """Chats of the training set's mix without the luck of the draw: SHEET of them a sheet.

    Every kind has exactly its share, and look-up lists, whose length decides how much of a text is random, come in
    each of RETRIEVAL_SIZES equally often. What is in them is drawn with the seed.
    """
    draw = random.Random(f"balanced {seed}")
    result = []
    for kind, weight in KINDS:
        for number in range(weight * len(RETRIEVAL_SIZES) * sheets):
            lines = RETRIEVAL_SIZES[number % len(RETRIEVAL_SIZES)]
            turns = retrieval(draw, lines) if kind is retrieval else _with_another(kind, draw)
            result.append(Chat(kind.__name__, tuple(turns)))
    return result


def render(turns: Sequence[Turn]) -> str:
    """The whole chat as text, in the chat template's format; only the last answer keeps its thinking."""
    last = max(index for index, turn in enumerate(turns) if turn.role == "assistant")
    text = ""
    for index, turn in enumerate(turns):
        thinking = ""
        if index == last:
            thinking = (
                f"<think>\n{turn.thinking}\n</think>\n\n" if turn.thinking else "<think>\n\n</think>\n\n"
            )
        text += f"<|im_start|>{turn.role}\n{thinking}{turn.text}<|im_end|>\n"
    return text


def _exchange(question: str, answer: str, thinking: str | None = None) -> Turns:
    return [Turn("user", question), Turn("assistant", answer, thinking)]


def arithmetic(draw: Draw) -> Turns:
    """A sum, difference or product, one in three with thinking."""
    sign = draw.choice("++--*")
    if sign == "*":
        a, b = draw.randint(0, 12), draw.randint(0, 20)
    else:
        a, b = draw.randint(0, 199), draw.randint(0, 199)
    if sign == "-" and b > a:
        a, b = b, a
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    words = {"+": f"Add {a} and {b}.", "-": f"Subtract {b} from {a}.", "*": f"Multiply {a} by {b}."}[sign]
    question = draw.choice(
        (f"What is {a} {sign} {b}?", f"Compute {a} {sign} {b}.", words, f"{a} {sign} {b} = ?")
    )
    thinking = None
    if draw.random() < 0.3:
        thinking = f"I need {a} {sign} {b}, which is {value}."
        if sign == "+":
            tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
            thinking = (
                f"{a} + {b}: {a // 10 * 10} + {b // 10 * 10} = {tens}, "
                f"{a % 10} + {b % 10} = {ones}, together {value}."
            )
    return _exchange(question, f"{a} {sign} {b} = {value}", thinking)


def word_problem(draw: Draw) -> Turns:
    """A journey in two parts, answered in steps."""
    speed1, speed2 = draw.choice([30, 40, 50, 60, 70, 80]), draw.choice([20, 30, 40, 50, 60])
    hours1, hours2 = draw.randint(1, 6), draw.randint(1, 6)
    vehicle = draw.choice(("train", "bus", "car", "boat"))
    way1, way2 = speed1 * hours1, speed2 * hours2
    return _exchange(
        f"A {vehicle} travels at {speed1} mph for {hours1} hours and then at {speed2} mph for {hours2} hours. "
        "How far does it go?",
        f"Step 1: Distance at {speed1} mph for {hours1} hours\n{speed1} * {hours1} = {way1} miles\n\n"
        f"Step 2: Distance at {speed2} mph for {hours2} hours\n{speed2} * {hours2} = {way2} miles\n\n"
        f"Step 3: Total\n{way1} + {way2} = {way1 + way2} miles",
    )


def list_ops(draw: Draw) -> Turns:
    """Sorting, reversing, extremes and even numbers of a short list."""
    numbers = [draw.randint(0, 99) for _ in range(draw.randint(3, 8))]
    given = _listed(numbers)
    question, answer = draw.choice(
        (
            (f"Sort these numbers: {given}.", _listed(sorted(numbers))),
            (f"Sort these numbers from large to small: {given}.", _listed(sorted(numbers, reverse=True))),
            (f"Reverse this list: {given}.", _listed(numbers[::-1])),
            (f"What is the largest of {given}?", f"The largest is {max(numbers)}."),
            (f"What is the smallest of {given}?", f"The smallest is {min(numbers)}."),
            (
                f"Which of these numbers are even: {given}?",
                _listed([n for n in numbers if n % 2 == 0]) or "None of them.",
            ),
        )
    )
    return _exchange(question, answer)


def string_ops(draw: Draw) -> Turns:
    """Letters of a word."""
    word = draw.choice(NAMES + COLOURS + ANIMALS + FRUITS + tuple(place.split()[0] for place in PLACES))
    question, answer = draw.choice(
        (
            (f"Write {word} in capital letters.", word.upper()),
            (f"Spell the word {word}.", "-".join(word.lower())),
            (f"What is the first letter of {word}?", f"The first letter of {word} is {word[0]}."),
            (f"What is the last letter of {word}?", f"The last letter of {word} is {word[-1]}."),
            (f"Repeat the word {word} three times.", f"{word} {word} {word}"),
            (f"How many letters are in {word}?", f"There are {len(word)} letters in {word}."),
        )
    )
    return _exchange(question, answer)


def fact(draw: Draw) -> Turns:
    """A capital or a chemical element."""
    if draw.random() < 0.5:
        country = draw.choice(list(CAPITALS))
        city = CAPITALS[country]
        question, answer = draw.choice(
            (
                (f"What is the capital of {country}?", f"The capital of {country} is {city}."),
                (f"{city} is the capital of which country?", f"{city} is the capital of {country}."),
            )
        )
        return _exchange(question, answer)
    number = draw.randrange(len(ELEMENTS))
    name, symbol = ELEMENTS[number][0].lower(), ELEMENTS[number][1]
    question, answer = draw.choice(
        (
            (f"What is the symbol of {name}?", f"The symbol of {name} is {symbol}."),
            (f"What is the atomic number of {name}?", f"The atomic number of {name} is {number + 1}."),
            (f"Which element has the symbol {symbol}?", f"{symbol} is the symbol of {name}."),
        )
    )
    return _exchange(question, answer)


def explain(draw: Draw) -> Turns:
    """One of EXPLANATIONS, 40 to 60 tokens."""
    topic = draw.choice(list(EXPLANATIONS))
    question = draw.choice(
        (f"Explain {topic}.", f"Can you explain {topic}?", f"In a few sentences, explain {topic}.")
    )
    return _exchange(question, EXPLANATIONS[topic])


def tips(draw: Draw) -> Turns:
    """The first few of TIPS as a numbered list."""
    topic = draw.choice(list(TIPS))
    count = draw.randint(3, 5)
    question = draw.choice((f"Give {count} tips for {topic}.", f"List {count} tips for {topic}."))
    answer = "\n".join(f"{number}. {tip}" for number, tip in enumerate(TIPS[topic][:count], 1))
    return _exchange(question, answer)


def code(draw: Draw) -> Turns:
    """One of FUNCTIONS in a code block."""
    function = draw.choice(FUNCTIONS)
    question = draw.choice(
        (
            f"Write a Python function that {function.does}.",
            f"Please write a Python function that {function.does}.",
            f"Show me Python code that {function.does}.",
        )
    )
    return _exchange(question, f"```python\n{function.source}\n```")


def story(draw: Draw) -> Turns:
    """Seven sentences, one of very many stories."""
    name, friend, thing = draw.choice(NAMES), draw.choice(NAMES), draw.choice(OBJECTS)
    place, home, colour = draw.choice(PLACES), draw.choice(PLACES), draw.choice(COLOURS)
    animal = draw.choice(ANIMALS)
    sentences = (
        f"{name} found the {thing} near the {place} early in the morning.",
        draw.choice(
            (
                "The air was cold and still.",
                "A thin rain had fallen all night.",
                "The sun was just above the roofs.",
            )
        ),
        f"A {colour} {animal} watched from a wall and did not move.",
        f"{name} carried the {thing} to {friend}, who lived by the {home}.",
        f'"It belonged to my grandmother," {friend} said quietly.',
        draw.choice(
            (
                "They sat together and talked until the lamps were lit.",
                "They laughed, and the day felt lighter.",
                "Neither of them spoke for a long time.",
            )
        ),
        f"When {name} went home, the {animal} was waiting by the door.",
    )
    question = draw.choice(
        (f"Write a short story about a {thing}.", f"Tell me a short story about {name} and a {thing}.")
    )
    return _exchange(question, " ".join(sentences))


def retrieval(draw: Draw, lines: int | None = None) -> Turns:
    """Codes listed in the first question, then questions about some of them. lines: how many are listed."""
    count = lines or draw.choice(RETRIEVAL_SIZES)
    keys = draw.sample([f"{colour} {animal}" for colour in COLOURS for animal in ANIMALS], count)
    codes = [draw.randint(1000, 9999) for _ in keys]
    what = draw.choice(("access code", "locker number", "order number"))
    asked = draw.randrange(count)
    context = "\n".join(f"The {what} of the {key} is {code}." for key, code in zip(keys, codes, strict=True))

    def about(index: int, before: str = "") -> Turns:
        return _exchange(
            f"{before}What is the {what} of the {keys[index]}?",
            f"The {what} of the {keys[index]} is {codes[index]}.",
        )

    turns = about(asked, f"{context}\n\n")
    for index in draw.sample(range(count), min(count, draw.randint(1, 12)) - 1):
        turns += about(index)
    return turns


def chain(draw: Draw) -> Turns:
    """Facts about the user, and questions about them some turns later."""
    name, colour = draw.choice(NAMES), draw.choice(COLOURS)
    animal, fruit = draw.choice(ANIMALS), draw.choice(FRUITS)
    memories = [
        (_exchange(f"My name is {name}.", f"Nice to meet you, {name}."),
         _exchange("What is my name?", f"Your name is {name}.")),
        (_exchange(f"My favourite colour is {colour}.",
                   f"I will remember that your favourite colour is {colour}."),
         _exchange("What is my favourite colour?", f"Your favourite colour is {colour}.")),
        (_exchange(f"I have a {animal}.", f"I will remember that you have a {animal}."),
         _exchange("Which animal do I have?", f"You have a {animal}.")),
        (_exchange(f"I like {fruit}.", f"I will remember that you like {fruit}."),
         _exchange("What do I like?", f"You like {fruit}.")),
    ]  # fmt: skip
    draw.shuffle(memories)
    count = draw.randint(1, 4)
    told = memories[:count]
    turns = [turn for telling, _ in told for turn in telling]
    if draw.random() < 0.4:
        turns += draw.choice(SHORT)(draw)
    draw.shuffle(told)
    for _, asking in told[: draw.randint(1, count)]:
        turns += asking
    return turns


def to_json(draw: Draw) -> Turns:
    """A JSON object of two to four fields."""
    fields = {
        "name": draw.choice(NAMES),
        "age": draw.randint(5, 90),
        "colour": draw.choice(COLOURS),
        "pet": draw.choice(ANIMALS),
    }
    chosen = {key: fields[key] for key in draw.sample(list(fields), draw.randint(2, 4))}
    listed = ", ".join(f"{key} {value}" for key, value in chosen.items())
    return _exchange(f"Return a JSON object with {listed}.", json.dumps(chosen))


def count(draw: Draw) -> Turns:
    """Counting up, down and in multiples."""
    first = draw.randint(0, 90)
    last = first + draw.randint(3, 25)
    factor = draw.randint(2, 12)
    question, answer = draw.choice(
        (
            (f"Count from {first} to {last}.", _listed(range(first, last + 1))),
            (f"Count down from {last} to {first}.", _listed(range(last, first - 1, -1))),
            (
                f"List the first ten multiples of {factor}.",
                _listed(factor * place for place in range(1, 11)),
            ),
        )
    )
    return _exchange(question, answer)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


SHORT: tuple[Kind, ...] = (arithmetic, list_ops, string_ops, fact, to_json, count)
# With their weights in the training set.
KINDS: tuple[tuple[Kind, int], ...] = (
    (arithmetic, 5),
    (word_problem, 2),
    (list_ops, 3),
    (string_ops, 2),
    (fact, 3),
    (explain, 2),
    (tips, 1),
    (code, 3),
    (story, 2),
    (retrieval, 3),
    (chain, 4),
    (to_json, 1),
    (count, 1),
)
# The fewest chats that have every kind's share and every size of list.
SHEET = sum(weight for _, weight in KINDS) * len(RETRIEVAL_SIZES)
