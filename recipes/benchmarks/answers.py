"""Questions to an instruct model: some with answers that copy from the question, others that give nothing to copy."""

import json

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
