"""Audio in prompts: decode within bounds, compute its spectrum, and embedding rows with the audio tower."""
