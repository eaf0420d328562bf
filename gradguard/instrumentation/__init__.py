"""What probes, monitors and rules stand on: the record of facts, weak references to tensors, the fault barrier."""
