"""What sessions on a GPU have in common."""
