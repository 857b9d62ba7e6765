"""Tenant: keys and grants -> Ready, the currency of its budget -> BudgetReady, rules of its log -> LoggingReady.
Gateways do not wait for it: they read the specification."""

from collections.abc import Callable

from shoal.api import names, reasons
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.model import Model
from shoal.api.tenant import Tenant, TenantStatus
from shoal.controllers.isolation import isolated, stored
from shoal.controllers.status import write_status
from shoal.controllers.world import World
from shoal.core.routing.consent import EVERYONE
from shoal.core.status import tenantstatus
from shoal.core.status.conditions import ConditionUpdate, merge
from shoal.kube.projections import Custom
from shoal.kube.queue import WorkQueue
from shoal.kube.resources import TENANTS

_LONGEST_WAIT = 24 * 3600.0


class TenantController:
    def __init__(
        self,
        world: World,
        queue: WorkQueue,
        currency: Callable[[], str | None] | None = None,
        refused: Callable[[], str | None] | None = None,
    ):
        """`currency`: of the price list in force, as gateways say; it gives None where it is not known, and is None
        where no gateway reports. `refused`: why the ledger refuses price lists, in the same way. Call `repriced` when
        one of the two changes."""
        self._world, self.queue, self._currency, self._refused = world, queue, currency, refused

    def on_tenant(self, key: str, before: Custom[Tenant] | None, after: Custom[Tenant] | None) -> None:
        if after is not None:
            self.queue.add(key)
        for custom in (before, after):
            for listed in custom.object.spec.keys if custom and custom.object else ():
                for contender in self._world.tenants.by("hash", listed.sha256):
                    self.queue.add(contender.metadata.name)

    def on_model(self, key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        if before is None or after is None:
            for tenant in self._world.tenants.by("model", key):
                self.queue.add(tenant.metadata.name)

    def on_adapter(self, _key: str, before: Custom[LoRAAdapter] | None, after: Custom[LoRAAdapter] | None) -> None:
        changed = _listed(before) ^ _listed(after)
        for custom in (before, after) if changed else ():
            for tenant in self._world.tenants.by("adapters", custom.metadata.namespace or "") if custom else ():
                if EVERYONE in changed or tenant.metadata.name in changed:
                    self.queue.add(tenant.metadata.name)

    def _listing(self, tenant: Tenant) -> set[str]:
        """Adapters that list the tenant, or everyone, in the namespaces that it grants."""
        found: set[str] = set()
        for grant in tenant.spec.adapters:
            for who in (tenant.metadata.name, EVERYONE):
                for custom in self._world.adapters.by("tenant", f"{grant.namespace}/{who}"):
                    if custom.metadata.deletion_timestamp is None:
                        found.add(f"{grant.namespace}/{custom.metadata.name}")
        return found

    def repriced(self) -> None:
        for key, custom in self._world.tenants.items():
            if custom.object is not None and (budget := custom.object.spec.budget) is not None and budget.amount:
                self.queue.add(key)

    def enqueue_all(self) -> None:
        for key in self._world.tenants.known_keys():
            self.queue.add(key)

    async def reconcile(self, key: str) -> float | None:
        """Returns seconds after which to look again, or None."""
        world = self._world
        return await isolated(world, TENANTS, world.tenants, key, self._reconcile, manager=names.MANAGER_TENANT)

    async def _reconcile(self, key: str) -> float | None:
        world = self._world
        custom = world.tenants.get(key)
        if custom is None or custom.metadata.deletion_timestamp is not None:
            return None
        now = world.now()
        again = None
        if custom.object is None:
            message = f"what is stored does not pass this version's validation: {custom.error}"
            finding = ConditionUpdate(reasons.READY, "False", reasons.INVALID, message)
            generation = custom.metadata.generation
            old = stored(TenantStatus, custom).conditions
            status = TenantStatus(
                conditions=merge(old, [finding], generation=generation, now=now), observed_generation=generation
            )
        else:
            tenant = custom.object
            contenders = [
                contender.object
                for listed in tenant.spec.keys
                for contender in world.tenants.by("hash", listed.sha256)
                if contender.object is not None and contender.metadata.uid != tenant.metadata.uid
            ]
            known = {
                key
                for grant in tenant.spec.models
                if world.models.get(key := f"{grant.namespace}/{grant.name}") is not None
            }
            decision = tenantstatus.decide(
                tenant,
                contenders=contenders,
                models=known,
                adapters=self._listing(tenant),
                now=now,
                currency=self._currency() if self._currency is not None else None,
                prices_refused=self._refused() if self._refused is not None else None,
                gateways_live=self._currency is not None,
            )
            status = decision.status
            if decision.again_at is not None:
                again = min((decision.again_at - now).total_seconds(), _LONGEST_WAIT)
        await write_status(world, TENANTS, world.tenants, custom, status, manager=names.MANAGER_TENANT)
        return again


def _listed(custom: Custom[LoRAAdapter] | None) -> frozenset[str]:
    if custom is None or custom.object is None or custom.metadata.deletion_timestamp is not None:
        return frozenset()
    return frozenset(custom.object.spec.tenants)
