"""Measurements of requests and of the engine: metrics, their Prometheus exposition, and logs."""
