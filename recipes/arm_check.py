"""Run the runtime's tests on emulated Arm cores, with bundles built on this machine; prints a table.

    sudo .venv/bin/python recipes/arm_check.py ROOT                            # every core and room: some hours
    sudo .venv/bin/python recipes/arm_check.py ROOT --cores cortex-a76 --rooms sampling kv

Needs Debian or Ubuntu on x86-64, root, a checkout with its .venv (`make test`), and
`apt-get install mmdebstrap qemu-user-static binfmt-support debian-archive-keyring`. ROOT is a new folder of 0.7 GB:
Debian's Python for arm64, the packages of pyproject.toml as wheels, the bundles, logs. Nothing is installed on this
machine, and mounts end with the process; a second run reuses ROOT. Emulated code is 20 to 50 times slower, so times
mean nothing, and a test may take ten minutes.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import tomllib

HERE = Path(__file__).resolve().parents[1]
DEBIAN, PYTHON = "bookworm", "3.11"
PACKAGES = f"python{PYTHON},libstdc++6,ca-certificates,coreutils,dash"
EXTRAS = ("cpu", "build", "guided", "metrics", "serve")
# Packages of the extra dev that the runtime's tests import; none of them needs torch, a browser or a GPU.
TESTED_WITH = ("openai", "anthropic", "pytest", "hypothesis", "jsonschema")
TOO_LARGE = re.compile("No module named '(torch|transformers|gguf)'")  # tests that compare with these are left out
ROOMS = ("sampling", "kv", "text", "guided", "sessions/onnxruntime/test_cpu.py", "engine", "server/dialects")
LIMIT_S = 600  # of a test
# /proc/cpuinfo of a core: its part number, and its features beyond the first ones.
BASE = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
DOT = f"{BASE} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp"
# By qemu's name: Raspberry Pi 4; Raspberry Pi 5, and close to Jetson Orin and Graviton 2; with i8mm.
CORES = {
    "cortex-a72": ("0xd08", BASE),
    "cortex-a76": ("0xd0b", DOT),
    "max,sve=off,sme=off": ("0xd40", f"{DOT} i8mm bf16"),
}
ENTER = """
mount -t proc proc "$0/proc" && mount --bind /dev "$0/dev" && mount --bind -o ro "$1" "$0/src"
mount --bind "$0/cpuinfo" "$0/proc/cpuinfo" || exit 1
root=$0; shift; exec chroot "$root" "$@"
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the folder that the Arm system is unpacked into")
    parser.add_argument("--cores", nargs="+", choices=CORES, default=list(CORES))
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), help=f"of tests/runtime: {', '.join(ROOMS)}")
    args = parser.parse_args(arguments)
    if problem := find_problem():
        parser.error(problem)
    root = args.root.resolve()
    if not (root / "ready").exists():
        unpack(root)
        build_bundles(root / "shared")
        (root / "ready").touch()
    print(f"ONNX Runtime {engine_version(root)}, Python {PYTHON}, {DEBIAN}, qemu {qemu_version()}\n")
    print("| core | room | passed | failed | skipped, or compare with torch |\n|---|---|---:|---:|---:|", flush=True)
    failed = 0
    for core in args.cores:
        for room in args.rooms:
            counts = run_tests(root, core, room)
            failed += counts[1]
            print(f"| {core} | {room} | {' | '.join(map(str, counts))} |", flush=True)
    return int(failed > 0)


def find_problem() -> str:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64") or os.geteuid() != 0:
        return "this runs as root on Linux, on x86-64"
    if missing := [name for name in ("mmdebstrap", "qemu-aarch64-static", "unshare") if not shutil.which(name)]:
        return f"{', '.join(missing)} not found: apt-get install mmdebstrap qemu-user-static binfmt-support"
    if not Path("/proc/sys/fs/binfmt_misc/qemu-aarch64").exists():
        return (
            "Linux does not start programs of Arm: mount -t binfmt_misc none /proc/sys/fs/binfmt_misc, then "
            "update-binfmts --enable qemu-aarch64"
        )
    return ""


def unpack(root: Path) -> None:
    """Unpack Debian's Python and the wheels, and the files about processors that ONNX Runtime reads on import."""
    debian = ["mmdebstrap", "--variant=extract", "--architectures=arm64", f"--include={PACKAGES}", DEBIAN, root]
    subprocess.run(debian, check=True)
    for folder in ("proc", "dev", "src", "sys/devices/system/cpu"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("possible", "present"):  # without them it crashes
        (root / "sys/devices/system/cpu" / name).write_text("0-1\n")
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28, 31, 34)]
    only = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", root / "packages", *only, *requirements()]
    subprocess.run(pip, check=True)


def requirements() -> list[str]:
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(each for name in EXTRAS for each in extras[name])]
    wanted += [each for each in extras["dev"] if each.startswith(TESTED_WITH)]
    return [*(each for each in wanted if not each.startswith("llmc-deploy")), "pytest-timeout", "safetensors"]


def build_bundles(shared: Path) -> None:
    """Build on this machine the bundles that test fixtures would build."""
    sys.path.insert(0, str(HERE / "tests"))
    from doubles import encoders

    from llmc.export import export
    from llmc.optimize.build import build
    from llmc.optimize.recipe import BuildRequest

    tiny = export(HERE / "recipes" / "tiny" / "checkpoint", shared / "tiny" / "export").output
    build(BuildRequest(tiny, shared / "int8" / "bundle"))
    build(BuildRequest(tiny, shared / "fp32" / "bundle", precision="fp32"))
    folder = shared / "encoders"
    folder.mkdir()
    for name, write in (("embed", encoders.write_embedder), ("rank", encoders.write_reranker)):
        build(
            BuildRequest(export(write(folder / f"{name}-checkpoint"), folder / f"{name}-export").output, folder / name)
        )
    for made in ("tiny", "int8", "fp32", "encoders"):
        (shared / made / "made").touch()


def run_tests(root: Path, core: str, room: str) -> tuple[int, int, int]:
    """Run a folder of tests and :func:`count` them; pytest's output goes into the folder ``logs`` of the root."""
    part, features = CORES[core]
    core_lines = f"Features : {features}\nCPU implementer : 0x41\nCPU architecture: 8\nCPU part : {part}\n\n"
    (root / "cpuinfo").write_text("".join(f"processor : {number}\n{core_lines}" for number in range(2)))
    environment = {
        "QEMU_CPU": core,
        "PYTHONPATH": "/packages:/src/.typing",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LLMC_TESTS_SHARED": "/shared",
        "PATH": "/usr/bin:/bin:/usr/sbin",
        "HOME": "/tmp",
        "LC_ALL": "C.UTF-8",
    }
    pytest = [f"/usr/bin/python{PYTHON}", "-m", "pytest", f"/src/tests/runtime/{room}", "-c", "/src/pyproject.toml"]
    pytest += ["-v", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}", "--junitxml=/tmp/found.xml"]
    log = root / "logs" / f"{core.split(',')[0]}-{Path(room).name}.log"
    log.parent.mkdir(exist_ok=True)
    (root / "tmp" / "found.xml").unlink(missing_ok=True)
    with log.open("wb") as file:
        enter = ["unshare", "--mount", "--propagation=private", "sh", "-c", ENTER, root, HERE]
        subprocess.run([*enter, *pytest], env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    if not (root / "tmp" / "found.xml").exists():
        sys.exit(f"{log}: the tests did not start or end; its last lines say why")
    return count((root / "tmp" / "found.xml").read_text(encoding="utf-8"))


def count(junit: str) -> tuple[int, int, int]:
    """Passed, failed, and skipped tests in pytest's report; tests that lack a large package count as skipped."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    lacking = sum(1 for case in failed if TOO_LARGE.search("".join(case.itertext())))
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    return len(cases) - len(failed) - skipped, len(failed) - lacking, skipped + lacking


def engine_version(root: Path) -> str:
    [folder] = (root / "packages").glob("onnxruntime-*.dist-info")
    return folder.name.split("-")[1].removesuffix(".dist")


def qemu_version() -> str:
    version = subprocess.run(["qemu-aarch64-static", "--version"], capture_output=True, text=True, check=True).stdout
    return version.split()[2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
