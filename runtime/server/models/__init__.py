"""The models of a service: loading, leasing, and what is asked of them."""
