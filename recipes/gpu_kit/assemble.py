"""Assemble the archives that make_parts.py cut into parts, and start to write the weights of the large graphs."""

import hashlib
import lzma
import shutil
import subprocess
import sys
import tarfile
import time
from functools import partial
from pathlib import Path

from common import PARTS, WORK, expect, main, report

SUMS = "SHA256SUMS"


def assemble(call: str) -> None:
    """Check a call's part, keep it in the work folder, and unpack every archive that is now complete."""
    folder, kept = PARTS / call, WORK / "parts"
    if not folder.exists():
        report(part="none", note="an owner's machine has no parts" if not PARTS.exists() else f"{folder} is missing")
        expect(not (PARTS / "A").exists() and not kept.exists(), f"carry {folder}")
        return
    kept.mkdir(parents=True, exist_ok=True)
    wrong = check_sums(folder)
    expect(not wrong, f"wrong sums: {' '.join(wrong)}")
    for file in folder.iterdir():
        shutil.copyfile(file, kept / (f"{SUMS}.{call}" if file.name == SUMS else file.name))
    begin, unpacked = time.monotonic(), []
    for name in sorted({file.name.rpartition(".")[0] for file in kept.glob("*.tar.xz.*")}):
        pieces = sorted(kept.glob(f"{name}.[0-9]*"))
        expect(".000of" in pieces[0].name, f"{name} lacks its first pieces: carry the parts before, too")
        if not (kept / f"{name}.done").exists() and len(pieces) == int(pieces[0].name.rpartition("of")[2]):
            unpack(pieces)
            (kept / f"{name}.done").touch()
            unpacked.append(name)
    report(part=sorted(file.name for file in folder.iterdir()), unpacked=unpacked, s=time.monotonic() - begin)


def check_sums(folder: Path) -> list[str]:
    """Names of a part's files that are missing or have a wrong checksum."""
    wrong = []
    for line in (folder / SUMS).read_text(encoding="ascii").splitlines():
        wanted, name = line.split()
        file = folder / name
        if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != wanted:
            wrong.append(name)
    return wrong


def unpack(pieces: list[Path]) -> None:
    whole = WORK / "whole.tar.xz"
    with whole.open("wb") as file:
        for piece in pieces:
            file.write(piece.read_bytes())
    with lzma.open(whole) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        archive.extractall(WORK, filter="tar")
    whole.unlink()


def start_weights() -> None:
    """Write the weights in a background session, which outlives this call."""
    bundles = sorted(path.parent for path in (WORK / "speed").glob("*/weights.json"))
    script = str(Path(__file__).with_name("weights.py"))
    command = ["setsid", "--fork", sys.executable, script, *map(str, bundles)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    report(bundles=len(bundles))


ITEMS = {**{call: partial(assemble, call) for call in "ABC"}, "start-weights": start_weights}
if __name__ == "__main__":
    main(ITEMS)
