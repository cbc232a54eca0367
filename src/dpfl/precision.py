"""The precision in which a GPU multiplies: torch by itself would convolve in TF32, with ten bits of mantissa."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Precision = Literal["float32", "tf32"]


@contextmanager
def products(precision: Precision) -> Iterator[None]:
    """Multiply in this precision inside the block."""
    import torch  # here, since the command line needs only the names, and torch takes a second to load

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
