"""Lowerings: rewrite the portable decoder into what one engine runs best."""
