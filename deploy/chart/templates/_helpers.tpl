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
image: {{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
imagePullPolicy: {{ .image.pullPolicy }}
{{- end -}}

{{- define "kv-router.natsUrl" -}}
{{- if .Values.natsUrl }}{{ .Values.natsUrl }}
{{- else if .Values.nats.enabled }}nats://{{ .Release.Name }}-nats:4222
{{- end -}}
{{- end -}}

{{- /* An engine as routers are to take it that find it themselves. */ -}}
{{- define "kv-router.worker" -}}
{{- $engines := .Values.engines }}
{{- $known := dict
  "endpoint" (printf "http://{ip}:%v" $engines.port)
  "kv_events_endpoint" (printf "tcp://{ip}:%v" $engines.eventsPort)
  "replay_endpoint" (printf "tcp://{ip}:%v" $engines.replayPort)
  "topic" "kv@"
  "model_name" $engines.model
  "max_num_batched_tokens" ($engines.maxNumBatchedTokens | int) }}
{{- mergeOverwrite $known .Values.discovery.worker | toJson }}
{{- end -}}

{{- /* Settings as variables, in the order of their names. */ -}}
{{- define "kv-router.settings" -}}
{{- range $key, $value := .settings }}
- {name: {{ $.prefix }}{{ $key | upper }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end -}}

{{- /* Where the bus is, and who may ask. */ -}}
{{- define "kv-router.shared" -}}
- {name: {{ .prefix }}NAMESPACE, value: {{ .root.Values.namespace | quote }}}
{{- with include "kv-router.natsUrl" .root }}
- {name: {{ $.prefix }}NATS_URL, value: {{ . | quote }}}
{{- end }}
{{- with .root.Values.natsCredentials }}
{{- if .secret }}
- {name: {{ $.prefix }}NATS_CREDS_FILE, value: {{ printf "/run/secrets/nats/%s" .key | quote }}}
{{- end }}
{{- end }}
{{- with .root.Values.tokens }}
{{- if .secret }}
- {name: {{ $.prefix }}TOKEN_FILE, value: {{ printf "/run/secrets/tokens/%s" .key | quote }}}
{{- else }}
- {name: {{ $.prefix }}INSECURE_PUBLIC_BIND, value: "true"}
{{- end }}
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
