"""``llmc serve``: serve bundles over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from llmc.cli.options import (
    EXISTING_FILE,
    SectionCommand,
    SectionOption,
    add_options,
    debug_option,
    find_bundle,
    offline_option,
    size,
)
from llmc.errors import UsageError, require
from llmc.runtime.api import DRAFT_WORDS
from llmc.runtime.server.config import Setting, read_config, settings
from llmc.sources import is_hub_name


def amount(text: str) -> int:
    return 0 if text == "0" else size(text)


UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
TYPES: dict[str, Any] = {"integer": int, "number": float, "text": str, "path": click.Path(path_type=Path), "list": str}


def _option(setting: Setting) -> Callable[[Any], Any]:
    text = f"{setting.help}{_show_default(setting)}"
    attributes: dict[str, Any] = {"section": setting.section, "help": text, "default": None, "show_default": False}
    name = setting.name.replace("_", "-")
    flag = f"--{name}/--no-{name}" if setting.kind == "flag" else setting.flag  # both, since flags override the file
    if setting.kind == "flag":
        attributes["is_flag"] = True
    elif setting.kind == "choice":
        attributes["type"] = click.Choice(setting.choices)
    else:
        attributes["type"] = amount if setting.unit == "bytes" else TYPES[setting.kind]
        attributes["multiple"] = setting.kind == "list"
    return click.option(flag, setting.name, cls=SectionOption, **attributes)


def _show_default(setting: Setting) -> str:
    if setting.default in (None, ()):
        return ""
    if setting.kind == "flag":
        return f"  [default: {'yes' if setting.default else 'no'}]"
    exact = [unit for unit in UNITS if setting.unit == "bytes" and setting.default % UNITS[unit] == 0]
    if exact:  # with a unit
        return f"  [default: {setting.default // UNITS[exact[0]]}{exact[0]}]"
    number = f"{setting.default:g}" if setting.kind == "number" else str(setting.default)
    return f"  [default: {number}{' ' * bool(setting.unit)}{setting.unit}]"


def name_models(bundles: tuple[str, ...]) -> dict[str, Path] | None:
    """Models by name: ``NAME=SOURCE``, or a source; the name of a folder or file is used, or all of a hub's name."""
    models: dict[str, Path] = {}
    for argument in bundles:
        name, sign, folder = argument.partition("=")
        if not (folder if sign else argument):
            raise UsageError("bundles", f"has {argument!r}, which names no model, expected a source, or NAME=SOURCE")
        path = Path(folder if sign else argument)
        if not sign and (path.exists() or not is_hub_name(argument)):
            name = path.resolve().name.removesuffix(".gguf")
        if name in models:
            raise UsageError("bundles", f"has the name {name!r} twice", f"name them, as NAME={path}")
        models[name] = path
    return models or None


# A flag for every key of the file except ``models``, which are arguments.
setting_options = add_options([_option(setting) for setting in settings() if setting.kind != "models"])


@click.command("serve", short_help="Serve BUNDLEs over HTTP, with a page for chats.", cls=SectionCommand)
@click.argument("bundles", nargs=-1, metavar="[NAME=]BUNDLE...")
@offline_option
@click.option("--config", type=EXISTING_FILE, help="TOML file of settings; flags go before it.")
@debug_option
@setting_options
def serve_command(bundles: tuple[str, ...], offline: bool | None, config: Path | None, **flags: Any) -> None:
    """Serve BUNDLEs over HTTP: to the clients of OpenAI (/v1) and Anthropic, and, with a page for chats, to a browser.

    A BUNDLE is a folder that llmc build wrote, or any source that llmc run takes, which is built once. The first one is
    loaded at once and answers requests that name no model, the others are loaded when they are asked for. Without
    settings only this machine can reach the service, at http://127.0.0.1:8000. Every setting is a flag here, and a key
    of the --config file, with _ for -.
    """
    settings = {name: value for name, value in flags.items() if value not in (None, ())}
    chosen = read_config(config, {**settings, "models": name_models(bundles)}, is_hub_name)
    require("fastapi", "serve")
    if chosen.ray:
        require("ray", "ray")
    models = {name: find_bundle(str(source), offline) for name, source in chosen.models.items()}
    draft = chosen.draft if chosen.draft in (None, *DRAFT_WORDS) else str(find_bundle(chosen.draft, offline))
    chosen = replace(chosen, models=models, draft=draft)
    # The web framework and Ray are imported only for this command.
    if chosen.ray:
        from llmc.runtime.server.fleet.run import serve
    else:
        from llmc.runtime.server.run import serve
    serve(chosen)
