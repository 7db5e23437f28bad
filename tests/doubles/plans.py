"""What a bundle might say of an engine; tests change what they are about with ``dataclasses.replace``."""

from dataclasses import replace

from llmc.bundle import EngineConfig, Profile

PLAN = EngineConfig(
    file="engine.plan",
    compute="float16",
    buckets=(256, 512),
    decode=Profile(1, 1, 1),
    prefill=Profile(1, 128, 32),
    platform="linux-x86_64",
    compute_capabilities=("8.9",),
    verified="cpu",
)
# With everything that an engine can have, for another machine.
FULL = replace(PLAN, platform="linux-aarch64", compute_capabilities=("8.7",))
