{{- define "kv-router.labels" -}}
app.kubernetes.io/name: kv-router
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "kv-router.metadata" -}}
name: {{ .root.Release.Name }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "kv-router.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{- define "kv-router.image" -}}
{{- $tag := .image.tag | default .root.Chart.AppVersion }}
image: {{ .image.repository }}{{ ternary "@" ":" (hasPrefix "sha256:" $tag) }}{{ $tag }}
imagePullPolicy: {{ .image.pullPolicy }}
{{- end -}}

{{- define "kv-router.natsUrl" -}}
{{- if .Values.natsUrl }}{{ .Values.natsUrl }}
{{- else if .Values.nats.enabled }}nats://{{ .Release.Name }}-nats:4222
{{- end -}}
{{- end -}}

{{- /* Engines have agents where there is a bus, but for those of a pool: routers hear these themselves. */ -}}
{{- define "kv-router.hasAgents" -}}
{{- if and (include "kv-router.natsUrl" .) (not .Values.epp.enabled) }}yes{{ end }}
{{- end -}}

{{- define "kv-router.hearsEngines" -}}
{{- if or .Values.discovery.enabled .Values.epp.enabled }}yes{{ end }}
{{- end -}}

{{- /* Without a bus, routers that find engines find each other too, and share bookings. */ -}}
{{- define "kv-router.sharesDirectly" -}}
{{- $config := .Values.router.config }}
{{- $isSetOtherwise := or $config.shadow $config.router_peers (eq (toString $config.router_replica_sync) "false") }}
{{- if not (or (include "kv-router.natsUrl" .) $isSetOtherwise) }}{{ include "kv-router.hearsEngines" . }}{{ end }}
{{- end -}}

{{- define "kv-router.pool" -}}
{{ .Values.epp.pool.name | default .Release.Name }}
{{- end -}}

{{- /* An engine as routers are to take it that find it themselves. */ -}}
{{- define "kv-router.worker" -}}
{{- $engines := .Values.engines }}
{{- $known := dict
  "endpoint" (printf "http://{ip}:%v" $engines.port)
  "topic" "kv@"
  "model_name" $engines.model
  "max_num_batched_tokens" ($engines.maxNumBatchedTokens | int) }}
{{- $ports := dict "kv_events" $engines.eventsPort "replay" $engines.replayPort }}
{{- $size := .Values.discovery.worker.data_parallel_size | default 1 | int }}
{{- range $name, $port := $ports }}
{{- if eq $size 1 }}
{{- $_ := set $known (printf "%s_endpoint" $name) (printf "tcp://{ip}:%v" $port) }}
{{- else }}
{{- $ranks := dict }}
{{- range until $size }}{{ $_ := set $ranks (toString .) (printf "tcp://{ip}:%d" (add $port .)) }}{{ end }}
{{- $_ := set $known (printf "%s_endpoints" $name) $ranks }}
{{- end }}
{{- end }}
{{- mergeOverwrite $known .Values.discovery.worker | toJson }}
{{- end -}}

{{- /* Helm reads every number as a fraction, and would write 2e+06. */ -}}
{{- define "kv-router.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}{{ else }}{{ toString . }}{{ end }}
{{- end -}}

{{- /* The bus, access, and the settings of a component; its `config` takes precedence over
them. As variables, in the order of their names. */ -}}
{{- define "kv-router.settings" -}}
{{- $values := .root.Values }}
{{- $all := dict "namespace" $values.namespace }}
{{- with include "kv-router.natsUrl" .root }}{{ $_ := set $all "nats_url" . }}{{ end }}
{{- with $values.natsCredentials.secret }}
{{- $_ := set $all "nats_creds_file" (printf "/run/secrets/nats/%s" $values.natsCredentials.key) }}
{{- end }}
{{- if $values.tokens.secret }}
{{- $_ := set $all "token_file" (printf "/run/secrets/tokens/%s" $values.tokens.key) }}
{{- else if not (or (hasKey .config "token_file") (hasKey .config "tls_client_ca_file")) }}
{{- $_ := set $all "insecure_public_bind" true }}
{{- end }}
{{- range $given := list .own .config }}
{{- range $key, $value := $given }}{{ $_ := set $all $key $value }}{{ end }}
{{- end }}
{{- range $key, $value := $all }}
- {name: {{ $.prefix }}{{ $key | upper }}, value: {{ include "kv-router.text" $value | quote }}}
{{- end }}
{{- end -}}

{{- define "kv-router.secretMounts" -}}
{{- if .Values.natsCredentials.secret }}
- {name: nats-credentials, mountPath: /run/secrets/nats, readOnly: true}
{{- end }}
{{- if .Values.tokens.secret }}
- {name: tokens, mountPath: /run/secrets/tokens, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kv-router.secretVolumes" -}}
{{- with .Values.natsCredentials.secret }}
- {name: nats-credentials, secret: {secretName: {{ . | quote }}}}
{{- end }}
{{- with .Values.tokens.secret }}
- {name: tokens, secret: {secretName: {{ . | quote }}}}
{{- end }}
{{- end -}}

{{- define "kv-router.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kv-router.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "kv-router.probes" -}}
livenessProbe:
  httpGet: {path: /health, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /ready, port: {{ .port }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{- define "kv-router.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "kv-router.labels" . | nindent 8 }}
{{- end -}}

{{- define "kv-router.placing" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
