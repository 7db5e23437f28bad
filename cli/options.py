"""Arguments and options that several verbs share."""

import re
from pathlib import Path

import click

EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FOLDER = click.Path(path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size(text: str) -> int:
    """Bytes as people write them: 800MB, 2GB, 1.5GiB, 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    count = float(match[1]) * _UNITS.get(match[2].upper(), 0) if match else 0.0
    if not 1 <= count < float("inf"):
        raise click.BadParameter(f"{text!r} is no size, expected for example 2GB, 1.5GiB or 800MB")
    return int(count)


def _remember_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(dict)["debug"] = True


debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of an error.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
force_option = click.option("--force", is_flag=True, help="Replace an existing output folder.")
output_option = click.option("-o", "--output", type=NEW_FOLDER, required=True, help="Folder to write.")
threads_option = click.option(
    "--threads", type=click.IntRange(min=1), help="Threads to compute with.  [default: as many as are usable]"
)
memory_option = click.option("--memory", type=size, help="Memory it may take, as 2GB.  [default: what is available]")
bundle_argument = click.argument("bundle", type=EXISTING_FOLDER)
