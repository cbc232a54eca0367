"""How fast a round is: four workloads, the floor that arithmetic sets, a plain loop, and what others make of them."""
