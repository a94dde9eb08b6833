"""The reference of the command line. `python -m cflpriv.cli.command_reference` prints docs/reference/commands.md."""

from typing import Any

import typer

from ..generated_pages import generated_page
from ..streams import print_file

__all__ = ["page"]

_COMMAND = "python -m cflpriv.cli.command_reference > docs/reference/commands.md"
_HEAD = """For people who use the command line. Exit codes: 0 success, 2 input that cannot be used (one line names it), 1 anything else.

`cflpriv --install-completion` installs completion of commands and options for bash, zsh, fish and PowerShell; `--show-completion` prints
it. Every command has `--help`.
"""


def page() -> str:
    """docs/reference/commands.md."""
    from . import app

    group: Any = typer.main.get_command(app)
    parts = [_HEAD]
    for name, command in group.commands.items():
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        options = [param for param in command.params if param.param_type_name == "option"]
        usage = " ".join(["cflpriv", name, *(_bracketed(argument) for argument in arguments), *(["[OPTIONS]"] if options else [])])
        parts += [f"## {name}\n", f"    {usage}\n", command.help.replace("\\[", "[").strip() + "\n"]
        if options:
            parts += ["| option | meaning |", "|---|---|", *(_row(option) for option in options), ""]
    return generated_page("Commands", _COMMAND, "\n".join(parts).rstrip() + "\n")


def _bracketed(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]")
    return name if argument.required else f"[{name}]"


def _row(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    default = "" if option.default in (None, False, "") else f" Default: `{option.default}`."
    text = (option.help or "").replace("\\[", "[").replace("|", "\\|").rstrip(".")
    return f"| `{option.opts[0]}{value}` | {text}.{default} |"


if __name__ == "__main__":
    print_file(page())
