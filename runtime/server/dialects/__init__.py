"""The dialects of the service: what each one's clients send, and what they are answered."""
