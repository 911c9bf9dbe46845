"""What looks at the answers of a service: metrics, spans, drift, the candidate, the shadow sample and its log."""
