"""The machine: processor, memory, GPUs, the engines' libraries, and the cache folder."""
