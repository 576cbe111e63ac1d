"""Fields that foreign manifests try to set and are none of its business."""

from __future__ import annotations

from typing import Final

_GROUPS: Final = (
    (
        """mount mounts volume volumes bind binds privileged cap_add capabilities security_opt
        devices device_requests user network networks ports pid ipc entrypoint command cmd args
        run_args env environment""",
        "take it out: a manifest says what is measured, never how a container is run",
    ),
    (
        "dockerfile syntax frontend build add copy from registry tag",
        "take it out: images come from pinned stacks; `attnrepro build FOLDER` adds your own",
    ),
    (
        "output out out_dir output_dir outdir result results path file pickle data",
        "take it out: results go where `run --output` says, inputs come from the generator",
    ),
    (
        """check checks oracle probes verify skip skip_checks skip_oracle no_oracle enabled disable
        disabled strict""",
        "take it out: probes and oracle always run",
    ),
)

FIXES: Final = {name: fix for names, fix in _GROUPS for name in names.split()}
"""Field name, in lower case, to what to do about it."""
