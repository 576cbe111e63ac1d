"""Try a recipe on some objects: `python -m attnrepro.images.tryout STACK OBJECT…`.

A kernel library compiles for hours. Its Dockerfile takes names of objects in `ARG KERNEL_OBJECTS`,
compiles those alone, each twice, with the flags of the whole build and without network, and says
what they cost and whether both were equal. No image of it enters the store.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
from typing import TYPE_CHECKING, Final

from attnrepro.errors import AttnreproError, BuildFailed, UsageError
from attnrepro.images import base, builders, context, fetch, gitsource, spec
from attnrepro.images.store import Store
from attnrepro.jsonio import JsonObject, loads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnrepro.images.builders import Builder
    from attnrepro.images.spec import Stack

_ARGUMENT: Final = 'ARG KERNEL_OBJECTS=""'
_ANSWER: Final = "objects.json"
_OBJECT: Final = re.compile(r"[A-Za-z0-9_]{1,100}")


def tryout(
    stack: Stack,
    objects: Sequence[str],
    *,
    builder: Builder,
    store: Store,
    progress: Callable[[str], None],
) -> JsonObject:
    """What compiling some objects of a stack costs, and whether it repeats.

    Args:
        stack: One whose Dockerfile takes KERNEL_OBJECTS.
        objects: Names of objects, without `.o`.
        builder: Runs the Dockerfile.
        store: Where the base and what is fetched lie.
        progress: Told each step.

    Returns:
        `objects`, each with name, seconds, size and the digests found; and `of`, how many there
        are in all.

    Raises:
        UsageError: the stack compiles nothing, or a name is none.
        BuildFailed: something cannot be fetched or compiled.
    """
    recipe = stack.files["Dockerfile"].decode()
    if _ARGUMENT not in recipe or not objects or not all(map(_OBJECT.fullmatch, objects)):
        message = f"{stack.label} takes no names of objects to compile, or {objects} are none"
        raise UsageError(message, hint="see `ARG KERNEL_OBJECTS` in its Dockerfile")
    named = recipe.replace(_ARGUMENT, f'ARG KERNEL_OBJECTS="{" ".join(objects)}"')
    base.check(store, stack, offline=False)
    settings, wheels = stack.document["base"], stack.document["wheels"]
    if stack.debs:
        fetch.debs(
            store,
            stack.debs,
            source=settings["source"],
            mirrors=(),
            offline=False,
            progress=progress,
        )
    fetch.wheels(
        store,
        stack.wheels,
        python=wheels["python"],
        sources=wheels.get("sources", {}),
        offline=False,
        progress=progress,
    )
    trees = gitsource.fetch(store, stack.trees, offline=False, progress=progress)
    root = base.prepare(store, stack, offline=False, progress=progress)
    with store.workspace("tryout") as folder:
        files = {**stack.files, "Dockerfile": named.encode()}
        main, fetched = context.write(
            store, folder, files, root=root, wheels=stack.wheels, trees=trees
        )
        target = folder / "root.tar"
        builder.build(
            main, wheels=fetched, epoch=stack.epoch, cached=True, target=target, progress=progress
        )
        with tarfile.open(target) as archive:
            for member in archive:
                if member.name.rpartition("/")[2] == _ANSWER and member.name.count("/") <= 3:
                    content = archive.extractfile(member)
                    if content is not None:
                        answer: JsonObject = loads(content.read(), what=_ANSWER)
                        return answer
    message = f"{stack.label} left no {_ANSWER}"
    raise BuildFailed(message)


def main() -> int:
    """Run one command line; 6 if an object differs between its two compilations."""
    parser = argparse.ArgumentParser(prog="python -m attnrepro.images.tryout", description=__doc__)
    parser.add_argument("stack")
    parser.add_argument("objects", nargs="+")
    parser.add_argument("--engine", choices=builders.ENGINES)
    arguments = parser.parse_args()
    try:
        answer = tryout(
            spec.resolve(arguments.stack),
            arguments.objects,
            builder=builders.choose(arguments.engine),
            store=Store(),
            progress=lambda line: print(line[:200], file=sys.stderr),
        )
    except AttnreproError as error:
        print(f"{error.message}\n{error.hint or ''}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(answer, indent=1))
    return 0 if all(len(item["sha256"]) == 1 for item in answer["objects"]) else 6


if __name__ == "__main__":
    sys.exit(main())
