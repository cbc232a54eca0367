"""Data, how it is shared out among clients, and who takes part in a round."""

from dpfl.federation.cohorts import (
    CohortRule,
    Everyone,
    PoissonCohort,
    RandomK,
    RoundRobin,
    Schedule,
)
from dpfl.federation.datasets import LOADERS, femnist, load
from dpfl.federation.federate import FEDERATIONS, count_of, federate, names_of
from dpfl.federation.own import from_arrays, from_torch
from dpfl.federation.partitions import Partition, parse_partition
from dpfl.federation.records import Dataset, Federation, Records
from dpfl.federation.sites import from_clients

__all__ = [
    "FEDERATIONS",
    "LOADERS",
    "CohortRule",
    "Dataset",
    "Everyone",
    "Federation",
    "Partition",
    "PoissonCohort",
    "RandomK",
    "Records",
    "RoundRobin",
    "Schedule",
    "count_of",
    "federate",
    "femnist",
    "from_arrays",
    "from_clients",
    "from_torch",
    "load",
    "names_of",
    "parse_partition",
]
