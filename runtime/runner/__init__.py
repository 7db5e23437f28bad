"""Scheduled steps as calls of a session: prefill, decode, verification, and what they cost."""
