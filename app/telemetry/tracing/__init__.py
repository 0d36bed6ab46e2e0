"""One trace per request, as X-Ray segments or OTLP spans; see docs/tracing.md."""
