"""What a forger does to a release on disk: edits, with digests that fit."""

import hashlib
import json

DROPPED = object()


def write_manifest(folder, text):
    (folder / "manifest.json").write_text(text)
    (folder / "manifest.sha256").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")


def edit_value(value, path, new):
    """Replace what lies at a path "a/0/b"; a function is given the old value."""
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    for key in keys:
        value = value[key]
    if new is DROPPED:
        del value[last]
    else:
        value[last] = new(value[last]) if callable(new) else new


def forge_release(folder, edits=()):
    """Apply the edits {path: value} of the manifest; then write digests of what is there."""
    manifest = json.loads((folder / "manifest.json").read_text())
    tensors = (folder / "tensors.safetensors").read_bytes()
    manifest["files"] = {"tensors.safetensors": hashlib.sha256(tensors).hexdigest()}
    for path, new in dict(edits).items():
        edit_value(manifest, path, new)
    write_manifest(folder, json.dumps(manifest))
