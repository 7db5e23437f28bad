"""Speed on a machine, alone and under load, and what a machine can run."""
