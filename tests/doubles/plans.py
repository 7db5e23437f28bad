"""Memory plans with few parts."""

from llmc.bundle import MemoryPlan, Part


def plan_of(*, workspace_per_token: int = 0, cache_per_token: int = 0, logits: int = 0, **fixed: int) -> MemoryPlan:
    """A plan of bytes by part: of each cached position, of each row's logits, and whatever runs."""
    workspace = Part("workspace", fixed.pop("workspace", 0), per_length=workspace_per_token)
    grows = (workspace, Part("cache", per_position=cache_per_token), Part("logits", per_row=logits))
    return MemoryPlan().add(*(Part(name, size) for name, size in fixed.items()), *grows)
