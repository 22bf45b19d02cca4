"""What people see of a run: live progress, learning curve, report and status, drawn from the bus."""
