{{/* Names of objects begin with this. */}}
{{- define "slackwater.name" -}}
{{- if contains "slackwater" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-slackwater" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "slackwater.selector" -}}
app.kubernetes.io/name: slackwater
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "slackwater.labels" -}}
{{ include "slackwater.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "slackwater.image" -}}
{{- $image := printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- with .Values.image.digest }}{{ $image = printf "%s@%s" $image . }}{{ end }}
{{- include "slackwater.pulled" (list . $image) }}
{{- end }}

{{/* The image of slackwater-populate, by its digest. */}}
{{- define "slackwater.populateImage" -}}
{{- with .Values.populators.image }}{{ include "slackwater.pulled" (list $ (printf "%s@%s" .repository .digest)) }}{{ end }}
{{- end }}

{{/* The name of an image: global.imageRegistry replaces its registry. */}}
{{- define "slackwater.pulled" -}}
{{- $image := last . }}
{{- with (first .).Values.global.imageRegistry | trimSuffix "/" }}
{{- $parts := splitList "/" $image }}
{{- if and (gt (len $parts) 1) (regexMatch "[.:]|^localhost$" (first $parts)) }}{{ $parts = rest $parts }}{{ end }}
{{- $image = printf "%s/%s" . (join "/" $parts) }}
{{- end }}
{{- $image }}
{{- end }}

{{/* "true" or nothing: fields of the CSIDriver, as the values say, or else as the object has them that
is there. */}}
{{- define "slackwater.attach" -}}
{{- if eq (toString .Values.csiDriver.attach) "auto" }}
{{- with lookup "storage.k8s.io/v1" "CSIDriver" "" .Values.driverName }}{{ if ne (toString .spec.attachRequired) "false" }}true{{ end }}{{ end }}
{{- else if .Values.csiDriver.attach }}true{{ end }}
{{- end }}
{{- define "slackwater.inline" -}}
{{- if eq (toString .Values.csiDriver.inlineEphemeral) "auto" }}
{{- with lookup "storage.k8s.io/v1" "CSIDriver" "" .Values.driverName }}{{ if has "Ephemeral" (.spec.volumeLifecycleModes | default list) }}true{{ end }}{{ end }}
{{- else if .Values.csiDriver.inlineEphemeral }}true{{ end }}
{{- end }}

{{/* Service account of the pods that have the sidecars. */}}
{{- define "slackwater.controllerAccount" -}}
{{ include "slackwater.name" . }}-{{ ternary "node" "controller" .Values.singleNode }}
{{- end }}

{{/* "true" or nothing: whether snapshots, groups are on. */}}
{{- define "slackwater.snapshots" -}}
{{- if or (eq (toString .Values.snapshots) "true") (and (eq (toString .Values.snapshots) "auto") (.Capabilities.APIVersions.Has "snapshot.storage.k8s.io/v1")) }}true{{ end }}
{{- end }}
{{- define "slackwater.groups" -}}
{{- if include "slackwater.snapshots" . }}
{{- if or (eq (toString .Values.groupSnapshots) "true") (and (eq (toString .Values.groupSnapshots) "auto") (include "slackwater.groupsVersion" .)) }}true{{ end }}
{{- end }}
{{- end }}
{{/* The newest version of the groups' CRDs that the cluster has. */}}
{{- define "slackwater.groupsVersion" -}}
{{- $found := "" }}
{{- range list "v1beta1" "v1beta2" "v1" }}
{{- if $.Capabilities.APIVersions.Has (printf "groupsnapshot.storage.k8s.io/%s" .) }}{{ $found = . }}{{ end }}
{{- end }}{{ $found }}
{{- end }}

{{/* A container that needs nothing but its socket. */}}
{{- define "slackwater.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}
{{/* The same in a node's pod: SELinux lets it use what the driver has made. */}}
{{- define "slackwater.confinedOnNode" -}}
{{ include "slackwater.confined" . }}
{{- with .Values.node.seLinuxType }}
seLinuxOptions: {type: {{ . }}}
{{- end }}
{{- end }}

{{/* What a service account is mounted as elsewhere, for containers that name it. */}}
{{- define "slackwater.token" -}}
- name: token
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end }}

{{/* Arguments that driver and router share. */}}
{{- define "slackwater.arguments" -}}
- --driver-name={{ .Values.driverName }}
- --log-format={{ .Values.logFormat }}
- --metrics-address={{ .Values.metrics.address }}:{{ .Values.metrics.port }}
{{- if .Values.metrics.perVolume }}
- --metrics-per-volume
{{- end }}
{{- $alpha := .Values.alpha }}
{{- if .Values.snapshotMetadata.create }}{{ $alpha = append $alpha "snapshot-metadata" | uniq }}{{ end }}
{{- with $alpha }}
- --alpha={{ join "," . }}
{{- end }}
{{- end }}

{{/* One pool as the driver's argument. */}}
{{- define "slackwater.pool" -}}
{{ .name }}={{ with .lvm }}lvm:{{ . }}{{ else }}file:{{ .path }}{{ end }}{{ if .init }},init{{ end }}{{ with .image }},image={{ . }}{{ end }}{{ with .snapshots }},snapshots={{ . }}{{ end }}{{ with .extent }},extent={{ . }}{{ end }}{{ with .overcommit }}{{ if ne (toString .) "1" }},overcommit={{ . }}{{ end }}{{ end }}{{ with .mount }}{{ if ne . "required" }},mount={{ . }}{{ end }}{{ end }}{{ with .trim }},trim={{ . }}{{ end }}{{ with .rawBlock }},rawBlock={{ . }}{{ end }}
{{- end }}

{{/* Names of the stock sidecars whose metrics are served, if any are. */}}
{{- define "slackwater.metricsOfSidecars" -}}
{{- if .Values.metrics.sidecars.create -}}
provisioner{{ if include "slackwater.attach" . }} attacher{{ end }} resizer{{ if include "slackwater.snapshots" . }} snapshotter{{ end }}
{{- end }}
{{- end }}
{{/* The port of the metrics of one of them. */}}
{{- define "slackwater.sidecarPort" -}}
{{- add (first .).Values.metrics.sidecars.port (get (dict "provisioner" 0 "attacher" 1 "resizer" 2 "snapshotter" 3) (last .)) }}
{{- end }}

{{/* A rule of a NetworkPolicy that opens these ports. */}}
{{- define "slackwater.openSidecars" -}}
{{- with include "slackwater.metricsOfSidecars" . -}}
- ports:
    {{- range splitList " " . }}
    - {port: {{ include "slackwater.sidecarPort" (list $ .) }}}
    {{- end }}
{{- end }}
{{- end }}

{{/* The stock sidecars beside a socket: of the router, or of the one node. */}}
{{- define "slackwater.sidecars" -}}
{{- $common := list "--csi-address=/csi/csi.sock" "--leader-election" "--leader-election-namespace=$(NAMESPACE)" (printf "--v=%v" .Values.sidecars.verbosity) }}
{{- $sidecars := list (dict "name" "provisioner" "args" (list "--strict-topology=false" "--immediate-topology=true" "--enable-capacity" (printf "--capacity-ownerref-level=%d" (ternary 1 2 .Values.singleNode)) "--capacity-threads=4" "--extra-create-metadata" "--timeout=60s" "--retry-interval-max=30s")) }}
{{- if include "slackwater.attach" . }}
{{- $sidecars = append $sidecars (dict "name" "attacher" "args" (list "--timeout=60s")) }}
{{- end }}
{{- $sidecars = append $sidecars (dict "name" "resizer" "args" (list "--timeout=60s" "--handle-volume-inuse-error=false")) }}
{{- if include "slackwater.snapshots" . }}
{{- $args := list "--timeout=180s" "--retry-interval-max=1m" "--extra-create-metadata" }}
{{- if include "slackwater.groups" . }}{{ $args = append $args "--feature-gates=CSIVolumeGroupSnapshot=true" }}{{ end }}
{{- $sidecars = append $sidecars (dict "name" "snapshotter" "args" $args) }}
{{- end }}
{{- range $sidecars }}
- name: {{ .name }}
  image: {{ include "slackwater.pulled" (list $ (index $.Values.sidecars .name).image) }}
  imagePullPolicy: {{ $.Values.sidecars.pullPolicy }}
  args:
    {{- range concat $common .args }}
    - {{ . }}
    {{- end }}
    {{- if $.Values.metrics.sidecars.create }}
    - --http-endpoint={{ $.Values.metrics.address }}:{{ include "slackwater.sidecarPort" (list $ .name) }}
  ports:
    - {name: {{ .name }}, containerPort: {{ include "slackwater.sidecarPort" (list $ .name) }}}
    {{- end }}
  env:
    - {name: NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
    - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
    - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  securityContext: {{- include (ternary "slackwater.confinedOnNode" "slackwater.confined" $.Values.singleNode) $ | nindent 4 }}
  resources: {{- toYaml $.Values.sidecars.resources | nindent 4 }}
  volumeMounts:
    - {name: socket, mountPath: /csi}
    {{- if $.Values.singleNode }}
    - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
    {{- end }}
{{- end }}
{{- if .Values.snapshotMetadata.create }}
- name: snapshot-metadata
  image: {{ include "slackwater.pulled" (list . .Values.sidecars.snapshotMetadata.image) }}
  imagePullPolicy: {{ .Values.sidecars.pullPolicy }}
  args:
    - --csi-address=/csi/csi.sock
    - --port=50051
    - --http-endpoint=:8080
    - --tls-cert=/metadata-tls/tls.crt
    - --tls-key=/metadata-tls/tls.key
    - --v={{ .Values.sidecars.verbosity }}
  ports:
    - {name: metadata, containerPort: 50051}
    - {name: metadata-http, containerPort: 8080}
  securityContext: {{- include (ternary "slackwater.confinedOnNode" "slackwater.confined" .Values.singleNode) . | nindent 4 }}
  resources: {{- toYaml .Values.sidecars.resources | nindent 4 }}
  volumeMounts:
    - {name: socket, mountPath: /csi}
    - {name: metadata-tls, mountPath: /metadata-tls, readOnly: true}
    {{- if .Values.singleNode }}
    - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
    {{- end }}
{{- end }}
{{- end }}

{{/* The certificate of that service. Without it, only this sidecar does not start. */}}
{{- define "slackwater.metadataVolume" -}}
{{- if .Values.snapshotMetadata.create -}}
- name: metadata-tls
  secret: {secretName: {{ .Values.snapshotMetadata.tlsSecret }}, defaultMode: 0440, optional: true}
{{- end }}
{{- end }}

{{/* A node's certificate, asked for and kept up to date. Beside the driver and never before it: the
kubelet is served without one, also while no router is there to sign. No other container of the node's pod
has a token for the API server. */}}
{{- define "slackwater.enrol" -}}
{{- if and (not .Values.singleNode) (eq .Values.certificates.mode "made") -}}
- name: enrol
  image: {{ include "slackwater.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - enrol
    - --node-name=$(NODE_NAME)
    - --namespace=$(NAMESPACE)
    - --out=/tls
    - --log-format={{ .Values.logFormat }}
  env:
    - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
    - {name: NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
    - {name: RUST_LOG, value: {{ .Values.logLevel | quote }}}
  # Root, without any capability: the folder of the certificates is root's.
  securityContext: {{- include "slackwater.confinedOnNode" . | nindent 4 }}
  resources: {{- toYaml .Values.node.guardResources | nindent 4 }}
  volumeMounts:
    - {name: tls, mountPath: /tls}
    - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}
{{- end }}
