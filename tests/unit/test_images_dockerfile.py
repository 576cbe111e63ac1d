"""The linter that stands between a foreign recipe and an engine."""

from __future__ import annotations

import pytest

from attnrepro.images.dockerfile import lint, parse

GOOD = """\
# a comment
FROM scratch AS build
ADD base.tar /
ARG SOURCE_DATE_EPOCH
ENV PATH=/usr/bin
RUN --mount=type=bind,from=wheels,target=/run/wheels \\
    # a comment between
    --mount=type=bind,source=compile.py,target=/run/recipe/compile.py \\
    set -eu; echo --network=host
FROM build
COPY --from=build /opt /opt
"""


def problems(text: str) -> list[str]:
    found = lint(text, contexts={"wheels"}, files={"compile.py", "requirements.lock"})
    return [problem.line() for problem in found]


def test_a_hermetic_file_passes() -> None:
    assert problems(GOOD) == []


def test_lines_are_joined_and_counted() -> None:
    steps = parse(GOOD)
    assert [step.name for step in steps] == [
        *("FROM", "ADD", "ARG", "ENV", "RUN", "FROM", "COPY"),
    ]
    assert steps[4].line == 6
    assert steps[4].rest.endswith("echo --network=host")


@pytest.mark.parametrize(
    "line",
    [
        "# syntax=docker/dockerfile:1",
        "#syntax = evil/frontend@sha256:0",
        "# escape=`",
        "// syntax=evil/frontend",
        '{"syntax": "evil/frontend"}',
        "\ufeff# syntax=evil/frontend",
        "FROM debian:bookworm",
        "FROM debian@sha256:" + "ab" * 32,
        "FROM --platform=linux/arm64 scratch",
        "FROM $BASE",
        "ADD https://example.com/x /x",
        'ADD ["https://example.com/x", "/x"]',
        "ADD git@github.com:a/b.git /x",
        "ADD --checksum=sha256:00 https://example.com/x /x",
        "ADD ../secret /x",
        "ADD /etc/passwd /x",
        "ADD . /x",
        "ADD *.lock /x",
        "COPY --from=debian:12 / /",
        "COPY --from=wheels / /",
        "COPY --chown=0 compile.py /x",
        "COPY <<EOF /x",
        "ADD base.tar",
        "RUN --network=host true",
        "RUN --security=insecure true",
        "RUN --device=nvidia.com/gpu=all true",
        "RUN --mount=type=secret,id=x,target=/run/x true",
        "RUN --mount=type=ssh true",
        "RUN --mount=type=cache,target=/run/x true",
        "RUN --mount=type=tmpfs,target=/run/x true",
        "RUN --mount=type=bind,from=debian,target=/run/x true",
        "RUN --mount=type=bind,from=wheels,source=../..,target=/run/x true",
        "RUN --mount=type=bind,source=/etc,target=/run/x true",
        "RUN --mount=type=bind,target=/run/x true",
        "RUN --mount=type=bind,from=wheels,target=/run/x,rw true",
        "RUN --mount=type=bind,from=wheels,target=/wheels true",
        "RUN --mount=type=bind,from=wheels,target=/run/../x true",
        "RUN \\\n  --network=host true",
        "RUN --mount=type=bind,from=wheels,target=/run/x --network=host true",
        "RUN <<EOF",
        "ONBUILD RUN true",
        "VOLUME /x",
        "USER root",
        "WORKDIR /new",
        "SHELL ['/bin/x']",
        "HEALTHCHECK CMD true",
        "INCLUDE x",
        "RUN true \\",
    ],
)
def test_everything_else_is_refused(line: str) -> None:
    assert problems(
        f"{line}\nFROM scratch\n" if line[0] in "#/{\ufeff" else f"FROM scratch\n{line}\n"
    )


def test_an_empty_file_is_refused() -> None:
    assert problems("# nothing\n")
