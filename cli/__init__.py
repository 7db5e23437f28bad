from llmc.cli.main import main
