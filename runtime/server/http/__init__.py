"""HTTP: guards, bodies, streams, errors and logs, the same for every dialect."""
