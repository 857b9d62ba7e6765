#!/usr/bin/env python3
"""Write SGLang's own arguments as a table (JSON on stdout): the source of `engine/sglang/sglang_args.json`.

Usage: VENV/bin/python dump_server_args.py        (VENV: see install.sh)

Per canonical name (the first spelling): `aliases`, `takes` (none, one, optional, list), `type` (int or float) and
`choices`, all as argparse itself holds them, so that the table cannot differ from what the engine will accept.
"""

import argparse
import json
import sys
from importlib.metadata import version

import serve_sglang_cpu  # noqa: F401 - the stand-ins without which SGLang cannot be imported on a machine without a GPU
from sglang.srt.server_args import ServerArgs


def _takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "none"
    if action.nargs is None:
        return "one"
    return "optional" if action.nargs == "?" else "list"


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    table = {}
    for action in parser._actions:
        if not action.option_strings:
            continue
        name, *aliases = [option.removeprefix("--") for option in action.option_strings]
        entry: dict[str, object] = {"takes": _takes(action)}
        if aliases:
            entry["aliases"] = aliases
        if action.type in (int, float):
            entry["type"] = action.type.__name__
        if action.choices is not None:
            entry["choices"] = sorted(str(choice) for choice in action.choices)
        table[name] = entry
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
    sys.stdout.write(f'{{\n  "version": "{version("sglang")}",\n  "arguments": {{\n{lines}\n  }}\n}}\n')


if __name__ == "__main__":
    main()
