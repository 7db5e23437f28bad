"""Speed on a machine, alone and under load, and the diagnosis of a machine."""
