"""Comparison: several systems on the same data at the same true ε, over several seeds."""

from dpfl.comparison.contender import Contender, contenders
from dpfl.comparison.fair_runs import Comparison, OnRun, Result, compare

__all__ = ["Comparison", "Contender", "OnRun", "Result", "compare", "contenders"]
