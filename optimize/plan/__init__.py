"""Memory of every stage, before anything is done."""
