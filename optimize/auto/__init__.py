"""The search for the recipe of a machine, and plots of what it found."""
