"""Fill the kit's parts on a machine with package registries: .gpu_kit/A, B and C, each carried with one call.

    python recipes/gpu_kit/make_parts.py                  # A and B; minutes, most of them for the large graphs
    python recipes/gpu_kit/make_parts.py --rtx            # and C: TensorRT-RTX, whose first bytes travel with B
    python recipes/gpu_kit/make_parts.py --bundles WORK   # the bundles alone, for the machine that has the GPU

Needs an environment with the extras ``export`` and ``cpu``, pip, and a checkout without changes: the kit holds llmc as
an archive of HEAD. Bundles and libraries stay in .gpu_kit/work, and are rebuilt when their sources change.
"""

import argparse
import hashlib
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from assemble import SUMS
from trim import trim

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
# Limit of a call's upload: a part and the checkout.
PART, CARRIED, SPARE = 45 << 20, 64 << 20, 1 << 19
PYTHON, PLATFORMS = "3.12", ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
LIBRARY = "onnxruntime-gpu==1.31.1"
LEFT_OUT = ("libonnxruntime.so", "providers_tensorrt", "transformers", "tools", "quantization", "datasets", "backend")
WHEELS = ("onnx-ir==1.1.0", "prompt_toolkit==3.0.53", "wcwidth==0.9.4", "nxrt-ep-cuda==0.1.0.dev6")
RTX = ("tensorrt-rtx-cu13-libs==1.7.1.116", "tensorrt-rtx-cu13-bindings==1.7.1.116")
RTX_MODULE = "from tensorrt_rtx_bindings import *\nfrom tensorrt_rtx_bindings import __version__\n"
SOURCES = (
    "bundle",
    "export",
    "optimize",
    "runtime",
    "recipes/gpu_kit/make_bundles.py",
    "recipes/benchmarks/make_model.py",
)
DICTIONARY = 1 << 28  # bytes that the packer looks back: a library repeats itself over long distances


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=CHECKOUT / ".gpu_kit")
    parser.add_argument("--architectures", default="90", help="whose machine code is carried (90); several: 86,90")
    parser.add_argument("--rtx", action="store_true", help="carry TensorRT-RTX, too")
    parser.add_argument("--bundles", type=Path, help="make the bundles in this folder, and nothing else")
    args = parser.parse_args(arguments)
    if args.bundles:
        make_bundles(args.bundles)
        return
    if git("status", "--porcelain", "--untracked-files=no"):
        parser.error("the checkout has changes, and llmc travels as an archive of HEAD; commit them first")
    work = args.folder.resolve() / "work"
    make_bundles(work)
    archive_source(work)
    install(work / "site", WHEELS, work)
    archives = [pack(work, "kit", ("llmc", "site", "tiny", "export", "speed"))]
    library = f"ort-{LIBRARY.rpartition('=')[2]}-sm{args.architectures.replace(',', '-')}"
    if not (work / f"{library}.tar.xz").exists():
        install(work / "ort", (LIBRARY,), work)
        trim_library(work / "ort", {int(each) for each in args.architectures.split(",")})
        pack(work, library, ("ort",))
    archives.append(work / f"{library}.tar.xz")
    if args.rtx:
        archives.append(work / "rtx.tar.xz")
        if not archives[-1].exists():
            install(work / "rtx", RTX, work)
            (work / "rtx" / "tensorrt_rtx").mkdir()
            (work / "rtx" / "tensorrt_rtx" / "__init__.py").write_text(RTX_MODULE)
            pack(work, "rtx", ("rtx",))
    tree = sum((CHECKOUT / name).lstat().st_size for name in git("ls-files", "-z").split("\0") if name)
    room = min(PART, CARRIED - SPARE - tree)
    cut(archives, args.folder.resolve(), room)
    for file in sorted(args.folder.glob("[ABC]/*")):
        print(f"{file.stat().st_size:>12,} {file}")
    print(f"a part has room for {room:,} bytes beside the checkout's {tree:,}")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout


def make_bundles(work: Path) -> None:
    """Make tiny and large bundles, unless they exist and their sources are unchanged."""
    known, sources = work / "sources.txt", git("rev-parse", *(f"HEAD:{name}" for name in SOURCES))
    if known.exists() and known.read_text() != sources:
        for name in ("tiny", "speed", "export"):
            shutil.rmtree(work / name, ignore_errors=True)
    for name in ("tiny", "speed"):
        (work / name).mkdir(parents=True, exist_ok=True)
    known.write_text(sources)
    import make_bundles as maker

    for name in maker.TINY:
        if not (work / "tiny" / f"{name}.npz").exists():
            print(f"making {name}", flush=True)
            maker.make_tiny(work / "tiny", name, work / "export" if name == maker.EXPORT else None)
    for model in maker.SPEED:
        if not all((work / "speed" / f"{model}-{each}" / "weights.json").exists() for each in maker.PRECISIONS):
            print(f"making {model}, in some minutes", flush=True)
            maker.make_speed(work / "speed", model)


def archive_source(work: Path) -> None:
    """Archive llmc at HEAD, without the trained model and the tests' data."""
    folder, archive = work / "llmc", work / "llmc.tar"
    shutil.rmtree(folder, ignore_errors=True)
    git("archive", "--prefix=llmc/", "-o", str(archive), "HEAD", "--", ".", ":!recipes/tiny", ":!tests/data")
    with tarfile.open(archive) as file:
        file.extractall(work, filter="tar")
    archive.unlink()
    (folder / "COMMIT").write_text(git("rev-parse", "HEAD"))


def install(folder: Path, packages: Iterable[str], work: Path) -> None:
    """Unpack wheels for the other machine's Python into an empty folder, without their dependencies."""
    shutil.rmtree(folder, ignore_errors=True)
    wheels = work / "wheels" / folder.name
    platforms = [f"--platform={platform}_x86_64" for platform in PLATFORMS]
    only = [
        "--no-deps",
        "--pre",
        "--only-binary=:all:",
        f"--python-version={PYTHON}",
        "--implementation=cp",
        *platforms,
    ]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels), *only, *packages]
    subprocess.run(pip, check=True)
    for package in packages:
        [wheel] = wheels.glob(f"{package.replace('-', '_').replace('==', '-')}-*.whl")
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder, [name for name in file.namelist() if not any(part in name for part in LEFT_OUT)])


def trim_library(folder: Path, architectures: set[int]) -> None:
    [library] = folder.rglob("libonnxruntime_providers_cuda.so")
    data = bytearray(library.read_bytes())
    trim(data, architectures)
    library.write_bytes(data)


def pack(folder: Path, name: str, members: Sequence[str]) -> Path:
    """Pack folders with xz's strongest settings, and its filter for machine code."""
    path, part = folder / f"{name}.tar.xz", folder / f"{name}.part"
    packer = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": DICTIONARY}
    with lzma.open(part, "wb", filters=[{"id": lzma.FILTER_X86}, packer]) as file:
        with tarfile.open(fileobj=file, mode="w|") as archive:
            for member in members:
                archive.add(folder / member, member)
    os.replace(part, path)
    return path


def cut(archives: Sequence[Path], folder: Path, room: int) -> None:
    """Fill the parts one after another: the first archive must end in A, the second by B, the third by C."""
    left = dict.fromkeys("ABC", room)
    for call in left:
        shutil.rmtree(folder / call, ignore_errors=True)
    for archive, last in zip(archives, "ABC", strict=False):
        data, pieces = archive.read_bytes(), []
        for call in "ABC"[: "ABC".index(last) + 1]:
            if data and left[call]:
                pieces.append((call, data[: left[call]]))
                data, left[call] = data[left[call] :], left[call] - len(pieces[-1][1])
        if data:
            raise SystemExit(f"{archive.name} is {len(data):,} bytes too large to be carried by call {last}")
        for number, (call, piece) in enumerate(pieces):
            (folder / call).mkdir(exist_ok=True)
            name = f"{archive.name}.{number:03}of{len(pieces)}"
            (folder / call / name).write_bytes(piece)
            with (folder / call / SUMS).open("a", encoding="ascii") as sums:
                sums.write(f"{hashlib.sha256(piece).hexdigest()}  {name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
