"""The command line: one module per verb; each parses its arguments, makes one library call and prints."""
