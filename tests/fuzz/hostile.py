"""Damaged and hostile files, tried one after another: each is used as if sound, or refused in one sentence.

The test starts this as a process of its own, for a case may end the process that tries it. By hand, for longer::

    python tests/fuzz/hostile.py bundle FOLDER --seconds 600 --seed 7

It prints the first case that fails as the line that belongs into ``corpus.json``, and exits with 1.
"""

import argparse
import json
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

SUBJECTS = {
    "bundle": ("llmc.json", "tokenizer.json", "tokenizer_config.json", "decoder.onnx"),
    "checkpoint": ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors"),
    "gguf": ("model.gguf",),
    "processor": ("preprocessor_config.json", "processor_config.json"),
    "images": ("image.png", "image.jpg", "image.webp"),
}
CORPUS = Path(__file__).with_name("corpus.json")

# No case may take longer, in seconds, or more address space than this beyond what the sound bundle takes, in bytes.
LONGEST = 20.0
MOST_MEMORY = 3 << 30
# An error is a sentence: one line, and no more characters than a terminal shows at a glance.
LONGEST_ERROR = 1200

# Raw JSON, for some of it can be written by nobody's ``json.dumps``.
VALUES = {
    **{text: text for text in ("null", "true", "0", "-1", "1", "3", "0.5", "NaN", "-Infinity", "1e308", "[]", "{}")},
    **{f"2^{bits}": str(2**bits) for bits in (16, 31, 32, 40, 63, 64)},
    "401 digits": "1" + "0" * 400,
    "5000 digits": "9" * 5000,
    "empty": '""',
    "outside": '"../../../../etc/passwd"',
    "endless": '"/dev/zero"',
    "escape codes": '"\\u001b[2J\\u0007\\u202e"',
    "half a character": '"\\ud800"',
    "long": '"' + "x" * 100_000 + '"',
    "many": "[" + ", ".join(["0"] * 80_000) + "]",
    "deep": "[" * 100_000 + "]" * 100_000,
    "prepend bomb": '{"type": "Sequence", "normalizers": ['
    + ", ".join(['{"type": "Prepend", "prepend": "' + "x" * 1000 + '"}'] * 1000)
    + "]}",
    "deep objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
}


@dataclass(frozen=True)
class Change:
    """A change of one file: ``value`` (a name of :data:`VALUES`, or JSON) and ``drop`` at a place of its JSON,
    ``bytes`` and ``cut`` at an offset, or a file of another ``kind`` in its place."""

    file: str
    what: Literal["value", "drop", "bytes", "cut", "kind"]
    place: tuple[str | int, ...] = ()
    content: str = ""

    def apply(self, folder: Path) -> None:
        """Put the changed file into the place of the sound one, which may be a hard link of somebody else's."""
        path = folder / self.file
        data = path.read_bytes()
        path.unlink()
        if self.what == "kind":
            _other_kind(path, self.content)
        else:
            path.write_bytes(self._changed(data))

    def _changed(self, data: bytes) -> bytes:
        if self.what == "bytes":
            piece, at = bytes.fromhex(self.content), int(self.place[0])
            return data[:at] + piece + data[at + len(piece) :]
        if self.what == "cut":
            return data[: int(self.place[0])]
        return self._with_value(data)

    def _with_value(self, data: bytes) -> bytes:
        head, tail = _json_part(self.file, data)
        tree = json.loads(head)
        parent = tree
        for key in self.place[:-1]:
            parent = parent[key]
        if self.what == "drop":
            del parent[self.place[-1]]
            text = json.dumps(tree).encode()
        else:
            parent[self.place[-1]] = "the changed value"
            text = json.dumps(tree).replace('"the changed value"', VALUES.get(self.content, self.content)).encode()
        return text if tail is None else len(text).to_bytes(8, "little") + text + tail


def _json_part(name: str, data: bytes) -> tuple[bytes, bytes | None]:
    """The JSON of a file, and what follows it: a safetensors file begins with its header's length."""
    if not name.endswith(".safetensors"):
        return data, None
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def _other_kind(path: Path, kind: str) -> None:
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to("/etc/hostname")
        case "endless":
            path.symlink_to("/dev/zero")
        case "missing":
            pass


def changes(subject: str, folder: Path, chance: random.Random) -> Iterator[Change]:
    """Changes without end, the same ones for the same seed and the same files."""
    while True:
        name = chance.choice([name for name in SUBJECTS[subject] if (folder / name).exists()])
        yield _random_change(name, (folder / name).read_bytes(), chance)


def _random_change(name: str, data: bytes, chance: random.Random) -> Change:
    if chance.random() < 0.05:
        return Change(name, "kind", content=chance.choice(["fifo", "folder", "link", "endless", "missing"]))
    if name.endswith((".json", ".safetensors")) and chance.random() < 0.85:
        place = _random_place(json.loads(_json_part(name, data)[0]), chance)
        what: Literal["value", "drop"] = "drop" if chance.random() < 0.15 else "value"
        return Change(name, what, place, chance.choice(list(VALUES)) if what == "value" else "")
    at = int(len(data) * chance.random() ** (4 if name.endswith(".gguf") else 2))  # a file begins with its header
    if chance.random() < 0.1:
        return Change(name, "cut", (at,))
    return Change(name, "bytes", (at,), chance.randbytes(chance.choice([1, 1, 1, 2, 4, 8])).hex())


def _random_place(tree: Any, chance: random.Random) -> tuple[str | int, ...]:
    """A path into the tree; half of the time it ends early, at a whole branch."""
    path: list[str | int] = []
    while isinstance(tree, dict | list) and tree and not (path and chance.random() < 0.15):
        key = chance.choice(list(tree)) if isinstance(tree, dict) else chance.randrange(len(tree))
        path.append(key)
        tree = tree[key]
    return tuple(path)


def use_bundle(folder: Path) -> None:
    """Load it as users do, continue a text and answer a message."""
    from llmc.runtime import load

    _seal(folder)
    with load(folder, threads=1) as model:
        model.generate("def", max_tokens=2, temperature=0)
        model.chat([{"role": "user", "content": "Hello"}], max_tokens=2, temperature=0)


def use_checkpoint(folder: Path) -> None:
    """Read it as ``llmc plan`` and the beginning of every export do."""
    from llmc.export.sources.checkpoint import read_checkpoint

    read_checkpoint(folder)


def use_gguf(folder: Path) -> None:
    """Read it as every export does, and make the weights that it does not hold as they are needed."""
    from llmc.export.sources.checkpoint import read_checkpoint
    from llmc.export.sources.codes import flatten_tensors
    from llmc.export.sources.made import MadeTensor

    for tensor in flatten_tensors(read_checkpoint(folder / "model.gguf").tensors).values():
        for _ in tensor.pieces() if isinstance(tensor, MadeTensor) else ():
            pass


def use_images(folder: Path) -> None:
    """Decode them as every request about images does."""
    from llmc.runtime.vision.decode import open_image

    for name in SUBJECTS["images"]:
        open_image(folder / name, name)


USES: dict[str, Callable[[Path], None]] = {
    "bundle": use_bundle,
    "checkpoint": use_checkpoint,
    "gguf": use_gguf,
    "processor": use_checkpoint,
    "images": use_images,
}


def _seal(folder: Path) -> None:
    """Let the manifest list what the files have become, as whoever forges a bundle would."""
    from llmc.bundle import sha256_file

    if (folder / "llmc.json").is_symlink() or not (folder / "llmc.json").is_file():
        return
    try:
        manifest = json.loads((folder / "llmc.json").read_bytes())
        for name, entry in manifest["files"].items():
            if (folder / name).is_file() and name != "weights.bin":
                entry["size"], entry["sha256"] = (folder / name).stat().st_size, sha256_file(folder / name)
        text = json.dumps(manifest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError):
        return  # what was changed is the manifest itself
    (folder / "llmc.json").unlink()
    (folder / "llmc.json").write_text(text)


def complaint(use: Callable[[Path], None], folder: Path) -> str | None:
    """What is wrong with how ``use`` took a changed folder; None where it worked, or was refused as it should be."""
    from llmc.errors import LlmcError

    start = time.monotonic()
    try:
        use(folder)
    except LlmcError as error:
        message = str(error)
        if not message.isprintable() or len(message) > LONGEST_ERROR:
            return f"its error is no sentence: {message!r:.300}"
    except BaseException as error:
        return f"raised {type(error).__name__}: {error!s:.300}"
    took = time.monotonic() - start
    return f"took {took:.0f} s" if took > LONGEST else None


def try_change(subject: str, sound: Path, change: Change, scratch: Path) -> str | None:
    """Apply a change to a copy of the sound folder and use it."""
    folder = scratch / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder, copy_function=os.link)
    change.apply(folder)
    return complaint(USES[subject], folder)


def main() -> None:
    """Try the corpus and then random changes, until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=USES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="go on after a case that fails")
    parser.add_argument("--scratch", type=Path, required=True, help="on the same file system as the folder")
    options = parser.parse_args()
    sound = options.scratch / "sound"
    shutil.copytree(options.folder, sound)
    USES[options.subject](sound)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_MEMORY, taken + MOST_MEMORY))
    old = [Change(**{**line, "place": tuple(line["place"])}) for line in json.loads(CORPUS.read_text())]
    old = [change for change in old if change.file in SUBJECTS[options.subject]]
    tried, failed, end = 0, 0, time.monotonic() + options.seconds
    for change in chain(old, _until(end, changes(options.subject, sound, random.Random(options.seed)))):
        print(json.dumps(asdict(change)), flush=True)  # the last line names the case that ended the process
        if problem := try_change(options.subject, sound, change, options.scratch):
            print(problem, flush=True)
            failed += 1
            if not options.all:
                break
        else:
            tried += 1
    print(f"{tried} were taken as they should, {failed} were not")
    sys.exit(failed > 0)


def _until(end: float, endless: Iterator[Change]) -> Iterator[Change]:
    for change in endless:
        if time.monotonic() > end:
            return
        yield change


if __name__ == "__main__":
    main()
