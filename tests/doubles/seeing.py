"""The tokenizer and the chat template of a small model that sees."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MARKS = ["<|end|>", "<|start|>", "<image>", "<fake_token_around_image>", "<global-img>"]
PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
# Of SmolVLM's kind: an image first has no space before it, and contents that are no lists are left out.
TEMPLATE = (
    "<|start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
WORDS = ["the quick brown fox jumps over the lazy dog", "\n\n", "User: Assistant: what is this?"] * 20


def write_seeing_tokenizer(folder: Path) -> Tokenizer:
    """Byte-level BPE with the marks of images, in files as transformers writes them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in [*MARKS, *PLACES]])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tokenizer
