"""Gradients: how the clipped sum of per-record gradients is made, from the layers of a model where that is cheaper."""
