"""Python for the gRPC protocols that others define, from their .proto files, by protoc."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import click

_ROOT: Final = Path(__file__).resolve().parents[2]
_FILES: Final = (
    "shoal/controllers/keda/protocol/externalscaler.proto",  # KEDA's external scaler
    "shoal/gateway/extproc/protocol/external_processor.proto",  # Envoy's external processing
)


def protocol_stubs() -> dict[str, str]:
    """Messages and stubs with their types: name in the repository -> text.

    Raises:
        click.ClickException: protoc refuses the file, or is not installed (it comes with the development tools).
    """
    tools = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as made:
        # The path that protoc is given becomes the import path of what it makes.
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={_ROOT}"]
        command += [f"--{what}_out={made}" for what in ("python", "grpc_python", "mypy", "mypy_grpc")]
        command += [f"--plugin={plugin}={tools / plugin}" for plugin in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
        done = subprocess.run([*command, *_FILES], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise click.ClickException(f"protoc does not take {' and '.join(_FILES)}: {said}")
        paths = sorted(path for path in Path(made).rglob("*.py*") if path.is_file())
        return {f"operator/{path.relative_to(made).as_posix()}": path.read_text(encoding="utf-8") for path in paths}
