{{/* Labels of every object. Call with (dict "root" $ "component" "gateway"); the component may be left out. */}}
{{- define "shoal.labels" -}}
{{ include "shoal.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name (.root.Chart.Version | replace "+" "_") }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels by which the pods of a component are found. */}}
{{- define "shoal.selector" -}}
app.kubernetes.io/name: {{ if .component }}shoal-{{ .component }}{{ else }}shoal{{ end }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- if .component }}
app.kubernetes.io/component: {{ .component }}
{{- end }}
app.kubernetes.io/part-of: shoal
{{- end }}

{{/* Labels of the pods: without the chart's version, which would roll them for nothing. */}}
{{- define "shoal.podLabels" -}}
{{ include "shoal.selector" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Shoal's image; a digest wins over a tag. */}}
{{- define "shoal.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* Kubernetes does not let a StatefulSet's claims change; its own error names neither the value nor a way. */}}
{{- define "shoal.sameClaims" -}}
{{- $old := lookup "apps/v1" "StatefulSet" .root.Release.Namespace .name -}}
{{- $sizes := dict -}}
{{- $classes := dict -}}
{{- range (($old.spec).volumeClaimTemplates | default list) -}}
{{- $_ := set $sizes .metadata.name .spec.resources.requests.storage -}}
{{- $_ := set $classes .metadata.name (.spec.storageClassName | default "") -}}
{{- end -}}
{{- range $name, $of := .claims -}}
{{- $before := get $sizes $name -}}
{{- $class := get $classes $name -}}
{{- if and $of.enabled $before (ne (include "shoal.bytes" $before) (include "shoal.bytes" $of.size)) -}}
{{- fail (printf "%s.size cannot change from %s to %s in place: a StatefulSet keeps its claims. Grow the PersistentVolumeClaims %s-%s-* (kubectl edit pvc; the StorageClass must allow it), then kubectl -n %s delete statefulset %s --cascade=orphan, and repeat this command: the pods stay, and a new StatefulSet takes them over" (get $.values $name) $before (toString $of.size) $name $.name $.root.Release.Namespace $.name) -}}
{{- end -}}
{{- if and $of.enabled $before (ne $class ($of.storageClassName | default "")) -}}
{{- fail (printf "%s.storageClassName cannot change from %s to %s in place: a StatefulSet keeps its claims. Run kubectl -n %s delete statefulset %s --cascade=orphan, then delete those of the PersistentVolumeClaims %s-%s-* that are Pending, with their pods (they hold no data), and repeat this command: the other pods stay with the volumes that they have, and a new StatefulSet takes them over" (get $.values $name) ($class | default "the cluster's default") ($of.storageClassName | default "the cluster's default") $.root.Release.Namespace $.name $name $.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A claim keeps its class; Kubernetes' own error names neither the value nor a way. An empty value may be the class that
     the claim has, and a claim without a class may get one. */}}
{{- define "shoal.sameClass" -}}
{{- $old := lookup "v1" "PersistentVolumeClaim" .root.Release.Namespace .name -}}
{{- $class := ($old.spec).storageClassName | default "" -}}
{{- if and $class .class (ne $class .class) -}}
{{- $change := printf "%s.storageClassName cannot change from %s to %s in place: the PersistentVolumeClaim %s keeps its class" .value $class .class .name -}}
{{- if eq (($old.status).phase | default "") "Pending" -}}
{{- fail (printf "%s. It is Pending and holds no data: run kubectl -n %s delete pvc %s, and repeat this command" $change .root.Release.Namespace .name) -}}
{{- end -}}
{{- fail (printf "%s, and it holds all usage records. Set the value back to %s, or move the records to a claim of the new class first, as docs/ledger.md says under Another StorageClass: with the ledger stopped, no record is lost" $change $class) -}}
{{- end -}}
{{- end -}}

{{/* The operator's configuration file: `OperatorConfig` of api/config.py. */}}
{{- define "shoal.config" -}}
{{- $engines := .Values.engines -}}
{{- $versions := $engines.versions -}}
{{- if not (hasKey $versions $engines.defaultVersion) -}}
{{- fail (printf "engines.defaultVersion %q is not a row of engines.versions (%s)" $engines.defaultVersion (keys $versions | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $vllm := $engines.vllm.versions -}}
{{- if not (hasKey $vllm $engines.vllm.defaultVersion) -}}
{{- fail (printf "engines.vllm.defaultVersion %q is not a row of engines.vllm.versions (%s)" $engines.vllm.defaultVersion (keys $vllm | sortAlpha | join ", ")) -}}
{{- end -}}
{{- if and (eq .Values.operator.signals.source "Prometheus") (not .Values.operator.signals.prometheus.url) -}}
{{- fail "operator.signals.source Prometheus needs operator.signals.prometheus.url, such as http://prometheus.monitoring.svc:9090" -}}
{{- end -}}
{{- if and .Values.operator.health.dcgm.match (not .Values.operator.signals.prometheus.url) -}}
{{- fail "operator.health.dcgm.match needs operator.signals.prometheus.url, such as http://prometheus.monitoring.svc:9090" -}}
{{- end -}}
{{- if and .Values.tracing.engines (not .Values.tracing.endpoint) -}}
{{- fail "tracing.engines needs tracing.endpoint, such as http://otel-collector.monitoring:4318" -}}
{{- end -}}
{{- if $engines.simulator.enabled -}}
{{- $simulated := dict -}}
{{- range $version, $row := $versions -}}
{{- $_ := set $simulated $version (dict "image" (include "shoal.image" $) "command" (list "shoal" "sim" "engine") "args" $engines.simulator.args "env" $engines.simulator.env) -}}
{{- end -}}
{{- $versions = $simulated -}}
{{- $simulated = dict -}}
{{- range $version, $row := $vllm -}}
{{- $_ := set $simulated $version (dict "image" (include "shoal.image" $) "command" (list "shoal" "sim" "vllm") "args" $engines.simulator.args "env" $engines.simulator.env) -}}
{{- end -}}
{{- $vllm = $simulated -}}
{{- end -}}
engines:
  defaultVersion: {{ $engines.defaultVersion | quote }}
  cpuPerGPU: {{ $engines.cpuPerGPU | quote }}
  memoryPerGPU: {{ $engines.memoryPerGPU | quote }}
  versions:
    {{- toYaml $versions | nindent 4 }}
  vllm:
    defaultVersion: {{ $engines.vllm.defaultVersion | quote }}
    versions:
      {{- toYaml $vllm | nindent 6 }}
agent:
  image: {{ include "shoal.image" . | quote }}
  pullPolicy: {{ .Values.image.pullPolicy }}
  cpu: {{ .Values.agent.cpu | quote }}
  memory: {{ .Values.agent.memory | quote }}
proxy:
  {{- toYaml .Values.proxy | nindent 2 }}
caBundle:
  {{- toYaml .Values.caBundle | nindent 2 }}
hubEndpoint: {{ .Values.hubEndpoint | quote }}
sources:
  {{- toYaml (omit .Values.sources "ports") | nindent 2 }}
  ports: [{{ range $i, $port := .Values.sources.ports }}{{ if $i }}, {{ end }}{{ int64 $port }}{{ end }}]
pods:
  {{- $pods := omit .Values.pods "runAsUser" }}
  {{- toYaml $pods | nindent 2 }}
  runAsUser: {{ int64 .Values.pods.runAsUser }}
cache:
  enabled: {{ .Values.cache.enabled }}
  hostPath: {{ .Values.cache.hostPath | quote }}
  size: {{ .Values.cache.size | quote }}
  nodeSelector:
    {{- toYaml .Values.cache.nodeSelector | nindent 4 }}
signals:
  {{- toYaml .Values.operator.signals | nindent 2 }}
health:
  {{- toYaml .Values.operator.health | nindent 2 }}
scaling:
  {{- toYaml .Values.operator.scaling | nindent 2 }}
tracing:
  {{- toYaml .Values.tracing | nindent 2 }}
extProc:
  enabled: {{ .Values.gateway.extProc.enabled }}
  proxyNamespaces:
    {{- toYaml .Values.gateway.extProc.proxyNamespaces | nindent 4 }}
external:
  allowedHosts:
    {{- toYaml .Values.gateway.external.allowedHosts | nindent 4 }}
scopeNamespaces: {{ include "shoal.scope" . }}
metricsAuth: {{ .Values.metrics.auth.enabled }}
roleTokens: {{ .Values.rbac.roles.enabled }}
transport:
  mtls:
    {{- omit .Values.transport.mtls "certificateHours" "authorityDays" | toYaml | nindent 4 }}
    certificateHours: {{ int64 .Values.transport.mtls.certificateHours }}
    authorityDays: {{ int64 .Values.transport.mtls.authorityDays }}
  sidecar:
    {{- toYaml .Values.transport.sidecar | nindent 4 }}
resyncSeconds: {{ int64 .Values.operator.resyncSeconds }}
logLevel: {{ .Values.operator.logLevel }}
{{- end }}

{{/* Environment of what traces, but for what the component's own extraEnv says. Call with
     (dict "root" $ "of" .Values.gateway). */}}
{{- define "shoal.tracing" -}}
{{- $tracing := .root.Values.tracing -}}
{{- $own := list -}}
{{- range .of.extraEnv }}{{ $own = append $own .name }}{{ end -}}
{{- if $tracing.endpoint -}}
{{- $all := dict "OTEL_EXPORTER_OTLP_ENDPOINT" $tracing.endpoint "OTEL_TRACES_SAMPLER" $tracing.sampler "OTEL_TRACES_SAMPLER_ARG" $tracing.ratio "SHOAL_TRACES_PER_SECOND" $tracing.perSecond -}}
{{- range $name, $value := $all }}
{{- if not (has $name $own) }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{- end -}}
{{- end }}

{{/* Annotations of Shoal's own pods: the component's, and whether it speaks mutual TLS. Call with
     (dict "root" $ "of" .Values.gateway). */}}
{{- define "shoal.podAnnotations" -}}
{{- if .root.Values.transport.mtls.enabled -}}
shoal.dev/transport: mtls
{{ end -}}
{{- with .of.podAnnotations -}}
{{- toYaml . }}
{{- end -}}
{{- end }}

{{/* What operator and gateway pods have in common. Call with (dict "root" $ "component" "gateway" "of" .Values.gateway). */}}
{{- define "shoal.podSpec" -}}
serviceAccountName: shoal-{{ .component }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  {{- if .of.affinity }}
  {{- toYaml .of.affinity | nindent 2 }}
  {{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "shoal.selector" . | nindent 14 }}
  {{- end }}
{{- with .of.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Security context of Shoal's containers: the restricted pod standard, and a read-only root. */}}
{{- define "shoal.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* A size such as 20Gi in bytes. */}}
{{- define "shoal.bytes" -}}
{{- $unit := dict "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
{{- mul (regexFind "^[0-9]+" .) (get $unit (regexFind "[A-Za-z]+$" .)) -}}
{{- end }}

{{/* Whether an admission policy is installed. Call with (dict "root" $ "value" "children"). Rendered without a cluster
     helm knows groups but not kinds, not even Pod: then the chart's kubeVersion says that there are such policies. */}}
{{- define "shoal.admission" -}}
{{- $kinds := .root.Capabilities.APIVersions -}}
{{- if (index .root.Values.admission .value).enabled -}}
{{- if or (not ($kinds.Has "v1/Pod")) ($kinds.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy") -}}
true
{{- else if eq .value "children" -}}
{{- fail "admission.children.enabled: this API server has no ValidatingAdmissionPolicy of admissionregistration.k8s.io/v1; set it to false" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* TCP ports that the node cache reaches: of sources, the hub's mirror, proxies, and of the API server. As JSON. */}}
{{- define "shoal.fetchPorts" -}}
{{- $ports := list (int64 443) (int64 6443) -}}
{{- range .Values.sources.ports }}{{ $ports = append $ports (int64 .) }}{{ end -}}
{{- range compact (list .Values.hubEndpoint .Values.proxy.http .Values.proxy.https) -}}
{{- $url := urlParse . -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "80" "443" (eq $url.scheme "http")) -}}
{{- $ports = append $ports (int64 $port) -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end }}

{{/* The namespaces that Shoal reads and writes, its own among them, as a JSON list; [] means all. */}}
{{- define "shoal.scope" -}}
{{- if .Values.scope.namespaces -}}
{{ append .Values.scope.namespaces .Release.Namespace | uniq | sortAlpha | toJson }}
{{- else -}}
[]
{{- end -}}
{{- end }}
