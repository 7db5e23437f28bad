"""What a bundle might say of an engine; tests change what they are about with ``dataclasses.replace``."""

from dataclasses import replace

from llmc.bundle import EngineConfig, MemoryPlan, Part, Profile

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


def plan_of(*, workspace_per_token: int = 0, cache_per_token: int = 0, logits: int = 0, **fixed: int) -> MemoryPlan:
    """A plan of bytes by part: of each cached position, of each row's logits, and whatever runs."""
    workspace = Part("workspace", fixed.pop("workspace", 0), per_length=workspace_per_token)
    grows = (workspace, Part("cache", per_position=cache_per_token), Part("logits", per_row=logits))
    return MemoryPlan().add(*(Part(name, size) for name, size in fixed.items()), *grows)
