"""Uploads of which only the weighted sum is formed."""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor


class Together(Mapping[int, Tensor]):
    """Who uploaded is known; what each sent is not, only what it adds up to."""

    def __init__(self, clients: Mapping[int, object], weighted_sum: Callable[[Mapping[int, float]], Tensor]) -> None:
        self._clients, self.weighted_sum = clients, weighted_sum

    def __getitem__(self, client: int) -> Tensor:
        raise LookupError(f"the upload of client {client} was not formed: ask to perform with apart=True")

    def __contains__(self, client: object) -> bool:
        return client in self._clients

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)
