"""What a model takes for each class: images that it is sure of, and how much they look like the class (UDP's Fig. 3).

From the mean of all public images, each class's log-probability is climbed a few short steps. Where a model has learned
what tells a class from the others, the way that it goes is that of the class's own mean: their correlation, averaged
over the classes, is 1 at best and 0 for a model that is noise.
"""

import base64
from typing import Any

import torch
from torch import Tensor, nn

from dpfl.errors import BadInput
from dpfl.federation import Records

_STEPS, _STEP = 20, 0.2  # how often, and how far in the length of an image


def portraits(model: nn.Module, start: Tensor, classes: int) -> Tensor:
    """Return for each class an image [classes, ...] that the model is surer of than of `start`."""
    image, model = start.expand(classes, *start.shape).clone(), model.eval()
    for _ in range(_STEPS):
        image.requires_grad_(True)
        surest = torch.log_softmax(model(image), dim=-1).diagonal().sum()
        (slope,) = torch.autograd.grad(surest, image)
        lengths = slope.flatten(1).norm(dim=1).clamp(min=torch.finfo(slope.dtype).tiny)
        image = (image + _STEP * slope / lengths.view(-1, *[1] * start.ndim)).detach()
    return image


def distinctness(images: Tensor, start: Tensor, means: Tensor) -> float:
    """Return the mean correlation between how images and classes' means differ from the mean of all."""
    both = ((images - start).flatten(1), (means - means.mean(0)).flatten(1))
    drawn, real = (part - part.mean(dim=1, keepdim=True) for part in both)
    return float(torch.nn.functional.cosine_similarity(drawn, real, dim=1).nan_to_num(0.0).mean())


def portrayed(models: list[nn.Module], public: Records, classes: int | None) -> dict[str, Any]:
    """Return the distinctness of each model, and the portraits of the first as grey bytes."""
    if classes is None or public.x.ndim != 4 or public.x.shape[1] != 1:
        raise BadInput(
            f"data must be grey images of classes where portraits are drawn, was records of {list(public.x.shape[1:])};"
            " choose mnist, fashion-mnist, femnist or digits"
        )
    start, found, first = public.x.mean(0), [], None
    means = torch.stack([public.x[public.y == label].mean(0) for label in range(classes)])
    for model in models:
        images = portraits(model.to(start.device), start, classes)
        found.append(distinctness(images, start, means))
        first = images if first is None else first
    assert first is not None
    grey = (255 * first[:, 0].clamp(0, 1)).byte()
    return {
        "distinctness": [float(f"{one:.7g}") for one in found],
        "portraits": {"shape": list(grey.shape), "grey": base64.b64encode(grey.numpy().tobytes()).decode("ascii")},
    }
