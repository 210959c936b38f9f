{{- /* A stateless HTTP component: its account, service, budget and deployment.
`root`, `component`, `command`, `prefix` of its variables; `values`: the user's values; `own`: settings
that the chart makes; `ports`: further ones of its container; `drainSeconds`, unless `config` says; `hasApi`: it asks the cluster; `isScaled`;
`isNamed`: its name is its pod's. */ -}}
{{- define "kv-router.deployment" -}}
{{- $values := .values }}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "kv-router.metadata" . | nindent 2 }}
automountServiceAccountToken: false
---
apiVersion: v1
kind: Service
metadata:
  {{- include "kv-router.metadata" . | nindent 2 }}
spec:
  selector:
    {{- include "kv-router.labels" . | nindent 4 }}
  ports:
    - {name: http, port: {{ $values.port }}, targetPort: http}
    {{- with $values.config.openai_port }}
    - {name: openai, port: {{ . }}, targetPort: openai}
    {{- end }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "kv-router.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "kv-router.labels" . | nindent 6 }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "kv-router.metadata" . | nindent 2 }}
spec:
  {{- if not .isScaled }}
  replicas: {{ $values.replicas }}
  {{- end }}
  strategy:
    rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
  selector:
    matchLabels:
      {{- include "kv-router.labels" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "kv-router.labels" . | nindent 8 }}
      {{- with $values.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ .root.Release.Name }}-{{ .component }}
      automountServiceAccountToken: {{ .hasApi | default false }}
      enableServiceLinks: false
      # The hook, the drain time, requests in flight (5 s), and a reserve.
      terminationGracePeriodSeconds: {{ add $values.preStopSeconds ($values.config.drain_s | default .drainSeconds | int) 10 }}
      securityContext:
        {{- include "kv-router.podSecurity" . | nindent 8 }}
      {{- with .root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- include "kv-router.spread" . | nindent 6 }}
      {{- include "kv-router.placing" $values | nindent 6 }}
      containers:
        - name: {{ .component }}
          {{- include "kv-router.image" (dict "root" .root "image" .root.Values.router.image) | nindent 10 }}
          args: [{{ .command }}]
          env:
            {{- if .isNamed }}
            - name: {{ .prefix }}NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            {{- end }}
            {{- include "kv-router.settings" (dict "root" .root "prefix" .prefix "own" .own "config" $values.config) | nindent 12 }}
            {{- with $values.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - {name: http, containerPort: {{ $values.port }}}
            {{- with $values.config.openai_port }}
            - {name: openai, containerPort: {{ . }}}
            {{- end }}
            {{- with .ports }}
            {{- . | nindent 12 }}
            {{- end }}
          # Where no compiled kernels can be had, a first start takes its time.
          startupProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 1
            timeoutSeconds: 3
            failureThreshold: 180
          {{- include "kv-router.probes" (dict "port" "http") | nindent 10 }}
          lifecycle:
            preStop:
              exec: {command: [sleep, {{ $values.preStopSeconds | quote }}]}
          resources:
            {{- toYaml $values.resources | nindent 12 }}
          securityContext:
            {{- include "kv-router.containerSecurity" . | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            {{- include "kv-router.secretMounts" .root | nindent 12 }}
            {{- with .mounts }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with $values.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        # Compiled kernels are copied there.
        - {name: tmp, emptyDir: {}}
        {{- include "kv-router.secretVolumes" .root | nindent 8 }}
        {{- with .volumes }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $values.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end -}}
