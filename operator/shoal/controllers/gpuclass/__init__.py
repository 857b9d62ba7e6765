"""Counts the GPUs of each class."""

from shoal.controllers.gpuclass.controller import GPUClassController

__all__ = ["GPUClassController"]
