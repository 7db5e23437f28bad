"""The service on more than one machine: replicas in a cluster of Ray, and a front before them (extra ``ray``)."""
