-- Health of Shoal's kinds in Argo CD. In the ConfigMap argocd-cm, once for each of shoal.dev_Model, shoal.dev_GPUClass,
-- shoal.dev_Tenant, shoal.dev_LoRAPool, shoal.dev_LoRAAdapter and shoal.dev_ModelRoute:   resource.customizations.health.shoal.dev_Model: | <this file>
local health = { status = "Progressing", message = "waiting for Shoal to look at it" }
local annotations = obj.metadata.annotations or {}
if annotations["shoal.dev/paused"] == "true" then
  return { status = "Suspended", message = "shoal.dev/paused is set" }
end
local status = obj.status
if status == nil or status.conditions == nil or status.observedGeneration ~= obj.metadata.generation then
  return health
end
local found = {}
for _, condition in ipairs(status.conditions) do
  found[condition.type] = condition
end
if found.Stalled ~= nil and found.Stalled.status == "True" then
  return { status = "Degraded", message = found.Stalled.message }
end
if found.Ready ~= nil then
  health.message = found.Ready.reason .. ": " .. found.Ready.message
  if found.Ready.status == "True" then
    health.status = "Healthy"
  end
end
return health
