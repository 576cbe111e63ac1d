"""A small host root: this machine's shell, and an environment that looks like torch's."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

from attnrepro.images.hosttree import HostPython

SITE = "opt/env/lib/python3.12/site-packages"
PYTHON = HostPython(
    executable="/opt/env/bin/python3", prefixes=("opt/env",), site=SITE, version="3.12.3"
)


def make_wheel(
    folder: Path, name: str, version: str, files: dict[str, bytes], requires: tuple[str, ...] = ()
) -> Path:
    """Write a wheel with a true RECORD."""
    stem = f"{name.replace('-', '_')}-{version}"
    lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}\n"
    members = {**files, f"{stem}.dist-info/METADATA": metadata.encode()}
    record = "".join(f"{path},{digest(data)},{len(data)}\n" for path, data in members.items())
    members[f"{stem}.dist-info/RECORD"] = f"{record}{stem}.dist-info/RECORD,,\n".encode()
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            info = zipfile.ZipInfo(member)
            info.external_attr = (0o744 if "/bin/" in member else 0o644) << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return path


def digest(data: bytes) -> str:
    """As RECORD spells it."""
    raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"sha256={raw}"


def install(root: Path, wheel: Path) -> None:
    """Unpack a wheel into the environment of a root."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root / SITE)


def make_host(root: Path) -> dict[str, Path]:
    """Lay out the root; returns its public wheels by name."""
    for program in ("sh", "cat", "chmod", "rm", "env", "ls", "id", "true"):
        found = shutil.which(program, path="/bin:/usr/bin")
        assert found, f"this machine has no {program}"
        put(root, f"usr/bin/{program}", Path(found).read_bytes(), 0o755)
        listed = subprocess.run(["ldd", found], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            put(root, f"usr{library.removeprefix('/usr')}", Path(library).read_bytes(), 0o755)
    for name in ("bin", "lib", "lib64"):
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    put(root, "usr/local/nvidia/lib64/libcuda.so.1", b"the driver")
    put(root, "usr/local/cuda-13.0/bin/nvcc", b"the toolkit")
    put(root, "usr/share/doc/x/copyright", b"long")
    put(root, "etc/passwd", b"root:x:0:0::/root:/bin/sh\n")
    put(root, "etc/shadow", b"root:secret\n", 0o600)
    put(root, "etc/ssh/ssh_host_ed25519_key", b"secret\n", 0o600)
    put(root, "etc/os-release", b'ID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n')
    put(
        root,
        "var/lib/dpkg/status",
        b"Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.39-0\n\n"
        b"Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n",
    )
    put(root, "var/lib/secret", b"secret\n")
    put(root, "home/user/.ssh/id_ed25519", b"secret\n", 0o600)
    put(root, "opt/env/bin/python3", b"#!/bin/sh\necho python\n", 0o755)
    put(root, "opt/other/file", b"not of the environment")
    wheels = root.parent / "public"
    wheels.mkdir()
    made = {
        "torch": make_wheel(
            wheels,
            "torch",
            "2.11.0",
            {"torch/__init__.py": b"x = 1\n", "torch/lib/libtorch.so": b"\x7fELF torch"},
            (
                "nvidia-cuda-runtime==13.0.96; platform_system == 'Linux'",
                "sympy",
                "optree; extra == 'optree'",
            ),
        ),
        "nvidia-cuda-runtime": make_wheel(
            wheels, "nvidia-cuda-runtime", "13.0.96", {"nvidia/cu13/lib/libcudart.so.13": b"cudart"}
        ),
        "sympy": make_wheel(wheels, "sympy", "1.14", {"sympy/__init__.py": b"y = 2\n"}),
        "jax": make_wheel(wheels, "jax", "0.11.2", {"jax/__init__.py": b"z = 3\n"}, ("sympy",)),
        "numpy": make_wheel(wheels, "numpy", "2.5.2", {"numpy/__init__.py": b"n = 4\n"}),
    }
    for wheel in made.values():
        install(root, wheel)
    put(root, f"{SITE}/jax/__pycache__/__init__.cpython-312.pyc", b"bytecode")
    put(root, f"{SITE}/torch/__pycache__/__init__.cpython-312.pyc", b"bytecode")
    return made


def put(root: Path, path: str, data: bytes, mode: int = 0o644) -> None:
    """Write a file below a root."""
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    place.chmod(mode)
