"""The common half of sessions on a GPU."""
