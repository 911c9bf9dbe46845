{{- define "cauc.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "cauc.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* Every pod of Ray carries these; so do those of the next cluster while a service is upgraded. KubeRay sets the second, and has
uses of its own for app.kubernetes.io/name. */}}
{{- define "cauc.selector" -}}
cauc-ray/release: {{ .Release.Name }}
ray.io/is-ray-node: "yes"
{{- end }}

{{- define "cauc.user" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "cauc.unprivileged" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{- define "cauc.amounts" -}}
{{- $amounts := dict "cpu" .cpu "memory" .memory -}}
{{- with .gpus }}{{ $_ := set $amounts "nvidia.com/gpu" (toString .) }}{{ end -}}
requests: {{ toJson $amounts }}
limits: {{ toJson $amounts }}
{{- end }}

{{- define "cauc.ports" -}}
node-manager-port: "6380"        # those of README.md; without these Ray takes any that are free
object-manager-port: "6381"
runtime-env-agent-port: "6382"
dashboard-agent-grpc-port: "6383"
{{- end }}

{{- /* A node's pod. Takes the root, what the node has (cpu, memory, gpus, nodeSelector), and whether it is the head. */}}
{{- define "cauc.pod" -}}
{{- $serves := eq .root.Values.kind "service" -}}
metadata:
  labels:
    cauc-ray/release: {{ .root.Release.Name }}
spec:
  {{- if not .head }}
  automountServiceAccountToken: false
  {{- end }}
  securityContext:
    {{- include "cauc.user" .root | nindent 4 }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .node.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if .node.gpus }}
  tolerations:
    {{- toYaml .root.Values.tolerations | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ if .head }}ray-head{{ else }}ray-worker{{ end }}
      image: {{ include "cauc.image" .root }}
      securityContext:
        {{- include "cauc.unprivileged" .root | nindent 8 }}
      env:
        {{- if $serves }}
        # On every node, since the router may stand on any. A key that the secret lacks keeps the pod from starting; a missing
        # variable would leave the service open.
        - name: CAUC_TOKEN
          valueFrom: {secretKeyRef: {name: {{ .root.Values.service.tokens }}, key: inference}}
        - name: CAUC_POLICY_TOKEN
          valueFrom: {secretKeyRef: {name: {{ .root.Values.service.tokens }}, key: policy}}
        {{- end }}
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
        {{- if .root.Values.cache.enabled }}
        - {name: TORCH_HOME, value: /cache/torch}
        - {name: HF_HOME, value: /cache/huggingface}
        {{- end }}
      ports:
        {{- if .head }}
        # What the head's service forwards, by the names that KubeRay knows.
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- if ne .root.Values.kind "job" }}
        - {name: serve, containerPort: 8000}
        {{- end }}
        - {name: as-metrics, containerPort: 44217}
        - {name: dash-metrics, containerPort: 44227}
        {{- end }}
        - {name: metrics, containerPort: 8080}
      {{- if and $serves (not .head) }}
      # Serve's proxy, which a node without replicas has none of. KubeRay's own probe calls wget, which the image lacks; its liveness
      # probe needs no program and stays.
      readinessProbe:
        httpGet: {path: /-/healthz, port: 8000}
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: 1
      {{- end }}
      resources:
        {{- include "cauc.amounts" .node | nindent 8 }}
      volumeMounts:
        - {name: data, mountPath: /data, readOnly: {{ $serves }}}
        {{- if .root.Values.cache.enabled }}
        - {name: cache, mountPath: /cache}
        {{- end }}
  volumes:
    - name: data
      persistentVolumeClaim: {claimName: {{ .root.Values.data.claim }}, readOnly: {{ $serves }}}
    {{- if .root.Values.cache.enabled }}
    - name: cache
      persistentVolumeClaim: {claimName: {{ .root.Values.cache.claim | default (printf "%s-cache" .root.Release.Name) }}}
    {{- end }}
{{- end }}

{{- /* The spec of a RayCluster: a head without work, and a group of nodes for each tier. */}}
{{- define "cauc.cluster" -}}
rayVersion: {{ .Values.rayVersion | quote }}
authOptions:
  mode: token
{{- if .Values.tls }}
tlsOptions:
  enabled: true
{{- end }}
{{- if .Values.gcs.redisAddress }}
gcsFaultToleranceOptions:
  backend: redis
  redisAddress: {{ .Values.gcs.redisAddress | quote }}
  {{- with .Values.gcs.passwordSecret }}
  redisPassword:
    valueFrom: {secretKeyRef: {name: {{ . }}, key: password}}
  {{- end }}
{{- end }}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ .Values.idleTimeoutSeconds }}
  securityContext:
    {{- include "cauc.unprivileged" . | nindent 4 }}
headGroupSpec:
  rayStartParams:
    {{- include "cauc.ports" . | nindent 4 }}
  resources: {CPU: "0"}
  labels: {tier: head}
  template:
    {{- include "cauc.pod" (dict "root" . "node" .Values.head "head" true) | nindent 4 }}
workerGroupSpecs:
  {{- range $tier, $group := .Values.groups }}
  - groupName: {{ $tier }}
    replicas: {{ $group.min }}
    minReplicas: {{ $group.min }}
    maxReplicas: {{ $group.max }}
    rayStartParams:
      {{- include "cauc.ports" $ | nindent 6 }}
    labels: {tier: {{ $tier }}}
    template:
      {{- include "cauc.pod" (dict "root" $ "node" $group "head" false) | nindent 6 }}
  {{- end }}
{{- end }}
