"""The guards of the service: keys, rates, foreign pages, and limits of requests and connections."""
