"""An embedding model's prompts: the words that its checkpoint puts before each kind of text."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from llmc.bundle import PROMPTS_FILE
from llmc.errors import BundleError, UsageError, format_value
from llmc.strict import read_json

# Prompts that contain a task description, which a text's own task may replace.
TASKS = (re.compile(r"(Instruct: )(.*)(\nQuery: ?)", re.DOTALL), re.compile(r"(task: )(.*)( \| query: )", re.DOTALL))
MOST_PROMPTS, LONGEST_PROMPT = 256, 10_000


@dataclass(frozen=True)
class Prompts:
    """Prompts by name, the default's name (empty for none), and the default width of vectors (0 for all)."""

    named: Mapping[str, str]
    default: str = ""
    dimensions: int = 0

    @classmethod
    def from_folder(cls, folder: Path) -> "Prompts":
        """Read a bundle's sentence-transformers file; without it no prompts. Raises BundleError: it is broken."""
        path = folder / PROMPTS_FILE
        try:
            values = read_json(path)
        except FileNotFoundError:
            return cls({})
        except (OSError, ValueError) as error:
            raise BundleError(f"{path} is broken ({error}); take it from the checkpoint again") from error
        config: dict[str, Any] = values if isinstance(values, dict) else {"prompts": "none"}
        name, dimensions = config.get("default_prompt_name"), config.get("truncate_dim")
        named = {} if config.get("prompts") is None else config["prompts"]
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
        """The words to put before a text.

        Args:
            instruction: the name of a prompt; a task in words, which replaces the task in the checkpoint's prompt; a
                whole prompt (it ends in a colon, or no prompt has a task); or None for the default.

        Raises:
            UsageError: it is not a text.
        """
        if instruction is None:
            return self.default
        if not isinstance(instruction, str):
            raise UsageError("instruction", f"is {format_value(instruction)}, expected a prompt's name or a text")
        if instruction in self.named or not instruction:
            return self.named.get(instruction, "")
        if not instruction.rstrip().endswith(":"):
            for pattern, prompt in product(TASKS, self.named.values()):
                if match := pattern.fullmatch(prompt):
                    return f"{match[1]}{instruction}{match[3]}"
        return instruction
