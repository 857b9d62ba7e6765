"""Turns a Model into Deployments and what belongs to them."""

from shoal.controllers.model.controller import ModelController

__all__ = ["ModelController"]
