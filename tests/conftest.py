"""Fixtures that several folders share."""

from tests.support.apiserver import apiserver

__all__ = ["apiserver"]
