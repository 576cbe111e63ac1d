"""Build a wheel of a kernel from its source: `kernel.py SOURCE WHEELS [OBJECT...]`.

With names of objects it compiles those alone, each twice with the flags of the whole build, and
writes what they cost and whether they were equal to WHEELS/objects.json: hours of compiling are
tried in minutes. An object is compared without its symbol table, where nvcc leaves the names of
its temporary files; the extension is linked without one.
"""

import hashlib
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import time

GIB_A_JOB = 4


def jobs() -> int:
    """Compilers at once: by cores, and by memory. What comes out does not depend on it."""
    memory = re.search(r"MemAvailable:\s*(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
    fitting = int(memory[1]) // (GIB_A_JOB << 20) if memory else 1
    return max(1, min(len(os.sched_getaffinity(0)), fitting))


def build(source: str, wheels: str) -> None:
    """Build the wheel with the environment's own tools, fetching nothing."""
    pip = [sys.executable, "-m", "pip", "--isolated", "--no-cache-dir", "wheel", "--no-index"]
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-input"]
    subprocess.run([*pip, *options, "--verbose", "--wheel-dir", wheels, source], check=True)


def digest(file: str) -> str:
    """Hash an object without its symbol table."""
    bare = pathlib.Path("/tmp/bare.o")
    subprocess.run(["strip", "--strip-unneeded", "-o", bare, file], check=True)
    return hashlib.sha256(bare.read_bytes()).hexdigest()


def compile_some(source: str, wheels: str, wanted: list[str]) -> None:
    """Let setup.py write the build's rules, and run those of some objects."""
    from torch.utils import cpp_extension

    results = []

    def run_rules(build_directory: str, *_: object, **__: object) -> None:
        listed = subprocess.run(
            ["ninja", "-t", "targets", "all"],
            cwd=build_directory,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        targets = [line.split(": ")[0] for line in listed.splitlines() if ".o: " in line]
        chosen = [name for name in targets if pathlib.Path(name).stem in wanted]
        if len(chosen) != len(wanted):
            sys.exit(f"there are no objects {wanted} among {len(targets)}")
        for target in chosen:
            found = set()
            started = time.monotonic()
            for _ in range(2):
                pathlib.Path(target).unlink(missing_ok=True)
                subprocess.run(["ninja", "-v", target], cwd=build_directory, check=True)
                found.add(digest(target))
            seconds = (time.monotonic() - started) / 2
            size = pathlib.Path(target).stat().st_size
            name = pathlib.Path(target).name
            print(f"{name}: {seconds:.0f} s, {size} bytes, {len(found)} digests", flush=True)
            results.append(
                {"object": name, "seconds": seconds, "size": size, "sha256": sorted(found)}
            )
        folder = pathlib.Path(wheels)
        folder.mkdir(parents=True)
        text = json.dumps({"objects": results, "of": len(targets)}, indent=1)
        (folder / "objects.json").write_text(text)
        sys.exit(0)

    cpp_extension._run_ninja_build = run_rules
    os.chdir(source)
    sys.argv = ["setup.py", "build_ext"]
    sys.path.insert(0, source)
    runpy.run_path("setup.py", run_name="__main__")


if __name__ == "__main__":
    os.environ["MAX_JOBS"] = str(jobs())
    if sys.argv[3:]:
        compile_some(sys.argv[1], sys.argv[2], sys.argv[3:])
    else:
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        build(sys.argv[1], sys.argv[2])
