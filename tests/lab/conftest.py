"""The shared lab of this folder's tests."""

from tests.support.lab import lab, namespace

__all__ = ["lab", "namespace"]
