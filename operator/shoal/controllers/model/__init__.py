"""Validates a Model, gathers its facts, has the Executor (`controllers/executor.py`) carry out its plan, writes status.

controller.py  one reconcile;  messages.py  events, and the status of a Model that this version does not understand
"""

from shoal.controllers.model.controller import ModelController

__all__ = ["ModelController"]
