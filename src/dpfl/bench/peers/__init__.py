"""What other libraries make of the workloads; each is imported only where it is installed and asked for."""
