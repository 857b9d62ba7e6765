"""Says whether a Tenant's keys and grants are usable."""

from shoal.controllers.tenant.controller import TenantController

__all__ = ["TenantController"]
