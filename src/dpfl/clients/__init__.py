"""Clients: what happens where the data is. They know an order, a model and their records, and no system's name."""
