"""``python -m llmc.cli``, for an environment without the command on its path."""

from llmc.cli.main import main

main()
