"""Which device computes which layers and neurons: devices and their rates, budgets, the solver, the table."""
