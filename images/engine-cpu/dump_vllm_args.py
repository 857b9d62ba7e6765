#!/usr/bin/env python3
"""Write the arguments of `vllm serve` as a table (JSON on stdout), for `operator/shoal/engine/vllm/vllm_args.json`.

Usage: VENV/bin/python dump_vllm_args.py        (VENV: see install-vllm.sh)

Per canonical name (the first long spelling): `aliases`, `takes` (none, one, optional, list), `type` (int or float),
`parse` (the name of vLLM's own function for the value) and `choices`, as argparse itself holds them. Those of the
parsers of tool calls and of reasoning are the names that vLLM has registered. Short spellings stand among the aliases
with their dash. What the parser takes without showing it: `_` for `-` in a name, a unique beginning of a name, and
`--name.key VALUE` where the value is JSON.

Another version's table needs neither a GPU nor its compiled parts: put its unpacked wheel first in PYTHONPATH and set
VLLM_TARGET_DEVICE=cpu.
"""

import argparse
import json
import sys

from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.version import __version__

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser  # from 0.33 on
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser


def _takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "none"
    if action.nargs is None:
        return "one"
    return "optional" if action.nargs == "?" else "list"


def main() -> None:
    table = {}
    registered = {
        "tool-call-parser": ToolParserManager.list_registered(),
        "reasoning-parser": ReasoningParserManager.list_registered(),
    }
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        long = [option.removeprefix("--") for option in action.option_strings if option.startswith("--")]
        if not long or long[0] == "help":
            continue
        name, *aliases = long
        aliases += [option for option in action.option_strings if not option.startswith("--")]
        entry: dict[str, object] = {"takes": _takes(action)}
        if aliases:
            entry["aliases"] = aliases
        if action.type in (int, float):
            entry["type"] = action.type.__name__
        elif action.type not in (None, str):
            entry["parse"] = getattr(action.type, "__name__", type(action.type).__name__)
        choices = registered.get(name, action.choices)
        if choices is not None:
            entry["choices"] = sorted(str(choice) for choice in choices)
        table[name] = entry
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
    sys.stdout.write(f'{{\n  "version": "{__version__.partition("+")[0]}",\n  "arguments": {{\n{lines}\n  }}\n}}\n')


if __name__ == "__main__":
    main()
