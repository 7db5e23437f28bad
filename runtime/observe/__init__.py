"""Metrics of requests and engines, their Prometheus exposition, and logs."""
