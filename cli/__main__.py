"""``python -m llmc.cli`` for where the command is not on the path."""

from llmc.cli.main import main

main()
