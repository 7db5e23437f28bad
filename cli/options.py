"""Arguments and options that several verbs share."""

from pathlib import Path

import click

EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FOLDER = click.Path(path_type=Path)


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
bundle_argument = click.argument("bundle", type=EXISTING_FOLDER)
