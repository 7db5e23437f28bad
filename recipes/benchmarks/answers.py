"""Questions to an instruct model: some with answers that copy from the question, others that give nothing to copy."""

import json
import random

_CODE = '''def read_scores(path):
    """Read names and scores from a file with one pair on each line."""
    scores = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            name, value = line.split(",")
            scores[name.strip()] = int(value)
    return scores


def best(scores, count):
    """The names with the highest scores, the best one first."""
    ordered = sorted(scores.items(), key=lambda item: -item[1])
    return [name for name, _ in ordered[:count]]


def write_report(path, scores):
    """Write a table of all names and scores."""
    with open(path, "w", encoding="utf-8") as file:
        for name, value in scores.items():
            file.write(f"{name}: {value}\\n")
'''
_PEOPLE = (("Alice", "Paris"), ("Bob", "Berlin"), ("Carol", "Madrid"), ("Dan", "Rome"), ("Eve", "Vienna"))
_RECORDS = [
    {"id": i, "name": name, "city": city, "active": i % 2 == 0, "tags": ["member", "newsletter"]}
    for i, (name, city) in enumerate(_PEOPLE)
]
_ARTICLE = """\
The city council decided on Tuesday to close the old bridge over the river for two years. Engineers had found cracks in
three of its seven arches during an inspection in spring. The mayor said that safety comes first and that the bridge
cannot carry buses any more. A temporary bridge for pedestrians and bicycles will be built next to it until October.
Cars have to take the motorway bridge in the north, which is four kilometres away. Shop owners on both banks fear that
they will lose customers, and they ask the council for help. The repair will cost eleven million euros, of which the
state pays one half.""".replace("\n", " ")

_SUMMARY = """\
The city council decided to close the old bridge over the river for two years, for engineers had found cracks in three
of its seven arches. A temporary bridge for pedestrians and bicycles will be built next to it, and cars have to take the
motorway bridge in the north. The repair will cost eleven million euros, of which the state pays one half."""

# Questions, and answers to them as a good model writes them.
COPYING = {
    "code edit": (
        f"Here is a Python file:\n\n```python\n{_CODE}```\n\nRename the function best to top_names. Repeat the whole "
        "file with this change and nothing else.",
        f"```python\n{_CODE.replace('def best', 'def top_names')}```",
    ),
    "JSON": (
        f"Here are records:\n\n```json\n{json.dumps(_RECORDS, indent=1)}\n```\n\nCarol has moved to Lisbon. Give all "
        "records as JSON.",
        f"```json\n{json.dumps(_RECORDS, indent=1).replace('Madrid', 'Lisbon')}\n```",
    ),
    "summary": (
        f"Text:\n\n{_ARTICLE}\n\nSummarise the text in three sentences, using its own words.",
        _SUMMARY.replace("\n", " "),
    ),
    "quotation": (f"Text:\n\n{_ARTICLE}\n\nRepeat the text above word by word.", _ARTICLE),
}
# Questions whose answers are the model's own.
FREE = {
    "story": "Write a long story about a lighthouse keeper and her cat.",
    "explanation": "Explain how a bicycle stays upright when it moves.",
}

_NAMES = (
    "Alice",
    "Bob",
    "Carol",
    "Dan",
    "Eve",
    "Fay",
    "Gus",
    "Hana",
    "Ivan",
    "Jo",
    "Kai",
    "Lea",
    "Max",
    "Nora",
    "Omar",
)
_CITIES = ("Paris", "Berlin", "Madrid", "Rome", "Vienna", "Lisbon", "Oslo", "Prague", "Dublin", "Athens")
_PRODUCTS = ("lamp", "desk", "office chair", "water bottle", "notebook", "garden hose", "bicycle helmet")
_COMPLAINTS = ("arrived broken", "came in the wrong colour", "was never delivered", "stopped working after a week")


def form_of(name: str, number: int) -> tuple[str, str]:
    """Of a form of :data:`FORMS` the question of that number, about a mail that was made up, and a good answer."""
    random_ = random.Random(number)
    who, city, product, complaint = (random_.choice(of) for of in (_NAMES, _CITIES, _PRODUCTS, _COMPLAINTS))
    order, count, euros = random_.randint(10_000, 99_999), random_.randint(1, 9), random_.randint(5, 400)
    mail = (
        f"My name is {who}, from {city}. I ordered {count} of your product {product} for {euros} euros, order {order}, "
        f"and it {complaint}. Please help me quickly."
    )
    record = {
        "customer": {"first_name": who, "city": city, "is_registered": True},
        "order": {"order_number": order, "items": [{"product_name": product, "quantity": count, "price_eur": euros}]},
        "complaint": {"description": complaint, "priority": random_.choice(("low", "high")), "requires_human": False},
    }
    letter = (
        f"Dear {who},\n\nThank you for contacting our customer service. We are very sorry to hear that your {product} "
        f"from order {order} {complaint}. We understand how frustrating this must be, and we will do our best to solve "
        "the problem as soon as possible.\n\nWe have opened a case for you, and a colleague will look at it within two "
        f"working days. If you would like a refund of {euros} euros instead, please answer this message.\n\nKind "
        "regards,\nThe customer service team"
    )
    return f"{FORMS[name]}\n\nMail: {mail}", json.dumps(record, indent=2) if "JSON" in name else letter


# Questions that are asked again and again about other mails, and answered in the same form.
FORMS = {
    "JSON, schema in the prompt": (
        "Extract the data as JSON with the keys customer (first_name, city, is_registered), order (order_number, "
        "items: product_name, quantity, price_eur) and complaint (description, priority, requires_human)."
    ),
    "JSON, schema not in the prompt": "Extract the data from the mail as JSON.",
    "letter of a template": "Write an answer to this mail.",
}
