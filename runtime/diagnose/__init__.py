"""A diagnosis of the machine: what each target would do on it, and whether a bundle runs here."""
