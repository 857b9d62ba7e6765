# pyright: basic, reportMissingImports=false, reportArgumentType=false
"""vLLM's own parser and its own checks of what was parsed. Runs in the engine's environment, not in ours.

Reads a list of {"args": [...], "config": true} from stdin and writes the answers after a line of its own: of each the
values that vLLM took, or the error with which it would have ended. With `config` the configuration is made too, as an
engine makes it before it loads anything: it reads the model's folder, and refuses what does not go together.
"""

import argparse
import contextlib
import io
import json
import logging
import sys

logging.disable(logging.WARNING)

from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args  # from 0.33 on
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args


PARSER = FlexibleArgumentParser()
make_arg_parser(PARSER.add_subparsers(dest="subparser").add_parser("serve"))


def parsed(words):
    """As `vllm serve` does it. Raises ValueError with the parser's own words."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = PARSER.parse_args(["serve", *words])
    except SystemExit:
        raise ValueError(said.getvalue().strip().splitlines()[-1]) from None
    if getattr(found, "model_tag", None) is not None:
        found.model = found.model_tag
    validate_parsed_serve_args(found)
    return found


def plain(value):
    return value if isinstance(value, str | int | float | bool | None) else json.loads(json.dumps(value, default=str))


def asked(case):
    try:
        found = parsed(case["args"])
        told = {name: plain(value) for name, value in vars(found).items()}
        if case.get("config"):
            engine = AsyncEngineArgs.from_cli_args(argparse.Namespace(**vars(found)))
            config = engine.create_engine_config()
            told["made"] = {
                "quantization": config.model_config.quantization,
                "runner": config.model_config.runner_type,
                "speculation": None if config.speculative_config is None else config.speculative_config.method,
                "adapters": None if config.lora_config is None else config.lora_config.max_loras,
            }
        return told
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


answers = [asked(case) for case in json.load(sys.stdin)]
print("ANSWERS")
print(json.dumps(answers))
