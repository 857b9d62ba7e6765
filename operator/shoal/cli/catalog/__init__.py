"""Catalogue of well-known GPUs as GPUClasses, for decisions without a fleet."""

from functools import cache
from importlib.resources import files

import yaml

from shoal.api.gpuclass import GPUClass


@cache
def built_in() -> dict[str, GPUClass]:
    """The catalogue by class name."""
    text = files("shoal.cli.catalog").joinpath("gpuclasses.yaml").read_text(encoding="utf-8")
    found = [GPUClass.model_validate(item) for item in yaml.safe_load(text)["items"]]
    return {c.metadata.name: c for c in found}
