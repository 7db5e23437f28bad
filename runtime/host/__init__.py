"""The machine: processor, memory, GPUs, energy, engines' libraries, and the folder of what is kept."""
