"""The command line: one module per verb; each parses, makes one library call and prints."""
