"""ModelRoutes: their conditions. Gateways do not wait for them: they read the specification."""

from shoal.controllers.route.controller import RouteController

__all__ = ["RouteController"]
