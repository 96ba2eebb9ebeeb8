{{- define "labels" -}}
app.kubernetes.io/name: cachesvc
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "image" }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- define "tls" }}{{ if or .Values.cluster .Values.s3.enabled }}true{{ end }}{{ end }}
{{- define "config" }}
{{- $any := eq .Values.ipFamily "IPv6" | ternary "[::]" "0.0.0.0" }}
{{- $set := dict "metrics" (print $any ":9464") "socket-mode" "660" }}
{{- $nvme := list }}
{{- range .Values.disks }}{{ $nvme = append $nvme (printf "%s/cache=%s,mounted" .path .budget) }}{{ end }}
{{- if $nvme }}{{ $_ := set $set "nvme" $nvme }}{{ end }}
{{- if include "tls" . }}
{{- $_ := set $set "tls-cert" "/etc/cachesvc-tls/tls.crt" }}
{{- $_ := set $set "tls-key" "/etc/cachesvc-tls/tls.key" }}
{{- $_ := set $set "tls-ca" "/etc/cachesvc-tls/ca.crt" }}
{{- end }}
{{- if .Values.cluster }}
{{- $_ := set $set "cluster" (printf "dns+srv://_peers._tcp.%s-peers" .Release.Name) }}
{{- $_ := set $set "tls-name" .Values.tls.name }}
{{- end }}
{{- if .Values.s3.enabled }}
{{- $_ := set $set "s3" (print $any ":9000") }}
{{- with .Values.s3.writes }}{{ $_ := set $set "s3-writes" . }}{{ end }}
{{- end }}
{{- merge $set .Values.config | toToml }}
{{- end }}
