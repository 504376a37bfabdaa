"""Assignment of layers and neurons to devices: devices and their rates, budgets, the solver, the table."""
