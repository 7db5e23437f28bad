"""Prompts that an embedding model's checkpoint names: what stands before a text, by the kind of text that it is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from llmc.bundle import PROMPTS_FILE
from llmc.errors import BundleError, UsageError, format_value
from llmc.strict import read_json

# Prompts that state a task in words: a text's own task may take the place of these words.
TASKS = (re.compile(r"(Instruct: )(.*)(\nQuery: ?)", re.DOTALL), re.compile(r"(task: )(.*)( \| query: )", re.DOTALL))
MOST_PROMPTS, LONGEST_PROMPT = 256, 10_000


@dataclass(frozen=True)
class Prompts:
    """Prompts by name, the one that is used by default (empty for none), and the width that vectors are cut to by
    default (0 for none)."""

    named: Mapping[str, str]
    default: str = ""
    dimensions: int = 0

    @classmethod
    def from_folder(cls, folder: Path) -> "Prompts":
        """Read sentence-transformers' file of a bundle; without one there are no prompts.
        Raises BundleError: it is broken."""
        path = folder / PROMPTS_FILE
        try:
            values = read_json(path)
        except FileNotFoundError:
            return cls({})
        except (OSError, ValueError) as error:
            raise BundleError(f"{path} is broken ({error}); take it from the checkpoint again") from error
        found: dict[str, Any] = values if isinstance(values, dict) else {"prompts": "none"}
        name, dimensions = found.get("default_prompt_name"), found.get("truncate_dim")
        named = {} if found.get("prompts") is None else found["prompts"]
        sound = (
            isinstance(named, dict)
            and len(named) <= MOST_PROMPTS
            and all(isinstance(text, str) and len(text) <= LONGEST_PROMPT for text in named.values())
            and (name is None or name in named)
            and (dimensions is None or (type(dimensions) is int and 0 < dimensions < 1 << 20))
        )
        if not sound:
            raise BundleError(
                f"{path} is broken (prompts, default_prompt_name or truncate_dim); take it from the checkpoint again"
            )
        return cls(named, named[name] if name is not None else "", dimensions or 0)

    def prefix(self, instruction: str | None) -> str:
        """The words before a text.

        Args:
            instruction: the name of a prompt; a task in words, which takes the place of the one that the checkpoint's
                prompt states; a whole prompt, which ends in a colon or where no prompt states a task; or None for the
                default.

        Raises:
            UsageError: it is no text.
        """
        if instruction is None:
            return self.default
        if not isinstance(instruction, str):
            raise UsageError("instruction", f"is {format_value(instruction)}, expected a prompt's name or a text")
        if instruction in self.named or not instruction:
            return self.named.get(instruction, "")
        if not instruction.rstrip().endswith(":"):
            for form, prompt in product(TASKS, self.named.values()):
                if found := form.fullmatch(prompt):
                    return f"{found[1]}{instruction}{found[3]}"
        return instruction
