{{/* What a pod needs to keep and serve ledgers: a container, a volume, and for the engine's container a variable and a mount. */}}

{{- define "kvreg.container" -}}
name: kvreg-ledger
image: {{ .Values.ledger.image }}
args:
  - --collector.disable-defaults
  - --collector.textfile
  - --collector.textfile.directory={{ .Values.ledger.directory }}
  - --web.listen-address=:{{ .Values.ledger.port }}
ports:
  - name: kvreg-ledger
    containerPort: {{ .Values.ledger.port }}
resources:
  {{- toYaml .Values.ledger.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  runAsUser: 65534
  capabilities:
    drop: [ALL]
volumeMounts:
  - name: kvreg-ledger
    mountPath: {{ .Values.ledger.directory }}
    readOnly: true
{{- end }}

{{- define "kvreg.volume" -}}
name: kvreg-ledger
emptyDir:
  sizeLimit: 256Mi
{{- end }}

{{- define "kvreg.env" -}}
- name: KVREG_LEDGER_DIR
  value: {{ .Values.ledger.directory }}
- name: PYTHONSAFEPATH
  value: "1"
{{- end }}

{{- define "kvreg.volumeMount" -}}
name: kvreg-ledger
mountPath: {{ .Values.ledger.directory }}
{{- end }}

{{- define "kvreg.labels" -}}
app.kubernetes.io/name: kvreg
{{- end }}
