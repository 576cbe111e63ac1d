"""The second half of a bundle's installer, run on the host with the bundled package.

`python -m attnrepro.images.bundle_finish PAYLOAD` writes the CDI spec where a GPU is there and no
good spec, loads the bundled images, and makes the host's own image where the bundle asks for it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnrepro.cli.failure import report
from attnrepro.cli.output import progress
from attnrepro.errors import BuildFailed
from attnrepro.images.store import Store
from attnrepro.images.wheelfiles import WheelInfo

if TYPE_CHECKING:
    from attnrepro.jsonio import JsonObject

CDI_PATH: Final = Path("/etc/cdi/nvidia.json")


def finish(payload: Path, *, store: Store | None = None) -> list[str]:
    """Make the bundled stacks ready; returns one line for each.

    Raises what `hostroot.build` does, and BuildFailed for a damaged image in the bundle.
    """
    from attnrepro.engines.docker import DockerEngine
    from attnrepro.images import hostroot

    contents = json.loads((payload / "contents.json").read_bytes())
    kept = store or Store()
    write_cdi(CDI_PATH)
    lines = [_adopt(payload / "images" / name, kept) for name in contents["images"]]
    if contents["hosts"]:
        records = hostroot.build(
            engine=DockerEngine(),
            store=kept,
            sets=[
                hostroot.KernelSet(
                    stack=host["stack"],
                    wheels=[payload / "kernels" / wheel["file"] for wheel in host["wheels"]],
                    digests={wheel["file"]: wheel["sha256"] for wheel in host["wheels"]},
                )
                for host in contents["hosts"]
            ],
            public=[public_wheel(path) for path in sorted((payload / "public").glob("*.json"))],
            progress=progress,
        )
        lines += [f"{one.stack}@{one.revision} {one.manifest_digest}" for one in records]
    return lines


def write_cdi(path: Path) -> None:
    """Write a CDI spec, unless there is no GPU or a good spec is there already."""
    from attnrepro.engines import cdi, gpuhost

    host = gpuhost.read()
    good = [s for s in host.cdi if s.kind == "nvidia.com/gpu" and s.path not in host.cdi_problems]
    if host.nvidia and not good:
        cdi.write_spec(host, path)
        progress(f"wrote {path}")


def public_wheel(path: Path) -> WheelInfo:
    """Read a public wheel's RECORD as a bundle carries it."""
    found = json.loads(path.read_bytes())
    return WheelInfo(**{**found, "requires": tuple(found["requires"])})


def _adopt(folder: Path, store: Store) -> str:
    """Move a bundled image's blobs into the store, each proven by its name."""
    from attnrepro.files import sha256_file

    document: JsonObject = json.loads((folder / "record.json").read_bytes())
    with store.workspace("adopt") as work:
        for blob in sorted((folder / "blobs").iterdir()):
            if sha256_file(blob) != blob.name:
                message = f"the bundle's blob {blob.name} is damaged"
                raise BuildFailed(message, hint="make the bundle again")
            # The store may be on another disk, where a rename does not go.
            moved = Path(shutil.move(blob, work / blob.name))
            store.adopt(moved, f"sha256:{moved.name}")
    record = store.save(document)
    return f"{record.stack}@{record.revision} {record.manifest_digest}"


def main() -> int:
    """Run with the payload's folder as the one argument; returns the exit code."""
    try:
        for line in finish(Path(sys.argv[1])):
            progress(f"ready: {line}")
    except (Exception, KeyboardInterrupt) as error:
        return report(error, as_json=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
