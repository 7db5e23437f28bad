"""The machine: processor, memory, GPUs, engines' libraries, and the folder of what is kept."""
