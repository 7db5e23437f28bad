"""Command R7B: Command R with windows in three layers of four; only these encode positions."""

from llmc.export.config import DecoderConfig
from llmc.export.families.cohere import read_parallel
from llmc.export.keys import Keys
from llmc.export.reading import windows_by_pattern


def read(keys: Keys) -> DecoderConfig:
    """The skipped keys repeat what holds for the whole family; transformers ignores them too."""
    keys.skip("cache_implementation", "layer_switch", "order_of_interleaved_layers", "position_embedding_type")
    keys.skip("_sliding_window_pattern", "rotary_pct", "use_embedding_sharing", "use_gated_activation")
    keys.skip("use_parallel_block", "use_parallel_embedding")
    windows = windows_by_pattern(keys, default=4)
    return read_parallel(keys, windows, tuple(map(bool, windows)))
