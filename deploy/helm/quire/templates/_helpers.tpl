{{- define "quire.name" -}}
{{ .Values.nameOverride | default .Chart.Name }}
{{- end }}

{{- /* At most 50 characters: Kubernetes cuts the names of pods at 63, of which it needs some. */ -}}
{{- define "quire.fullname" -}}
{{- $name := include "quire.name" . }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains $name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "quire.selector" -}}
app.kubernetes.io/name: {{ include "quire.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "quire.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* In volumes of the pod: its root file system is read-only. */ -}}
{{- define "quire.folders" -}}
- name: HOME
  value: /tmp
- name: XDG_CACHE_HOME
  value: /cache
{{- end }}
