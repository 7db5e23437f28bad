"""What a machine is and has, and what it lets us keep."""
