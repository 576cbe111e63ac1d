"""What the CPU is, from /proc and /sys; null where a machine does not say.

Names of hosts, users and serial numbers are not read.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

_LEVELS: Final = (
    (
        "x86_64_v4",
        {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    ),
    ("x86_64_v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    ("x86_64_v2", {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}),
)
"""Levels of the x86-64 psABI by the names that the kernel gives their flags; a level needs those
below it."""


def describe(root: Path = Path("/")) -> dict[str, object]:
    """Return the CPU's record: integers, texts, lists and nulls."""
    first = _first_processor(root)
    flags = frozenset((first.get("flags") or first.get("Features") or "").split())
    frequency = root / "sys/devices/system/cpu/cpu0/cpufreq"
    return {
        "kind": "cpu",
        "name": first.get("model name", "unknown"),
        "vendor": first.get("vendor_id"),
        "family": _integer(first.get("cpu family")),
        "model": _integer(first.get("model")),
        "stepping": _integer(first.get("stepping")),
        "microcode": first.get("microcode"),
        "machine": os.uname().machine,
        "isa": isa_level(flags),
        "flags": " ".join(sorted(flags)),
        "caches": caches(root),
        "last_level_cache_bytes": last_level_cache(root),
        "logical": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)),
        "threads_per_core": _threads_per_core(root),
        "numa_nodes": len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        "memory_bytes": _memory(root),
        "hypervisor": "hypervisor" in flags,
        "governor": _text(frequency / "scaling_governor"),
        "frequency_min_khz": _integer(_text(frequency / "cpuinfo_min_freq")),
        "frequency_max_khz": _integer(_text(frequency / "cpuinfo_max_freq")),
        "boost": _text(root / "sys/devices/system/cpu/cpufreq/boost"),
        "kernel": os.uname().release,
    }


def isa_level(flags: frozenset[str]) -> str | None:
    """Return the highest x86-64 level whose flags, and those of the levels below, are all there."""
    level = None
    for name, needed in reversed(_LEVELS):
        if not needed <= flags:
            break
        level = name
    return level


def caches(root: Path = Path("/")) -> list[dict[str, object]]:
    """Return the caches that CPU 0 sees: level, kind, bytes, CPUs that share it."""
    found: list[dict[str, object]] = []
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index[0-9]*")):
        size = _bytes(_text(index / "size"))
        if size is not None:
            found.append(
                {
                    "level": _integer(_text(index / "level")),
                    "kind": (_text(index / "type") or "unknown").lower(),
                    "bytes": size,
                    "shared_by": _text(index / "shared_cpu_list"),
                }
            )
    return found


def last_level_cache(root: Path = Path("/")) -> int | None:
    """Return the bytes of the largest cache that CPU 0 sees."""
    sizes = [size for cache in caches(root) if isinstance(size := cache["bytes"], int)]
    return max(sizes, default=None)


def _first_processor(root: Path) -> dict[str, str]:
    fields: dict[str, str] = {}
    with suppress(OSError):
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.partition("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    return fields


def _threads_per_core(root: Path) -> int | None:
    listed = _text(root / "sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    if listed is None:
        return None
    count = 0
    for part in listed.split(","):
        low, _, high = part.partition("-")
        count += int(high or low) - int(low) + 1
    return count


def _memory(root: Path) -> int | None:
    with suppress(OSError):
        match = re.search(r"^MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.M)
        if match:
            return int(match[1]) * 1024
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,15}", text) else None


def _bytes(text: str | None) -> int | None:
    match = re.fullmatch(r"(\d+)([KMG]?)", text or "")
    if match is None:
        return None
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]
