"""Memory of every phase, before anything is done."""
