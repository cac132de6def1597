"""Puts a list of what it holds into a wheel: CycloneDX 1.6, in its *.dist-info/sboms (PEP 770).

    sbom.py WHEEL            adds or renews the list, and its line in RECORD
    sbom.py --check WHEEL    fails where the list or RECORD is not of the wheel's files

It names each file with its hash, the compilers, and the CUDA runtime that the library has in it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

# In the library: lib/meson.build writes it for nf4_build_info.
_BUILD = re.compile(
    rb"compiler: (?P<compiler>[^\n\0]+)\n(?:[^\n\0]+\n)*?"
    rb"cuda: (?P<nvcc>[^\n\0]+)(?:\ncuda_runtime: (?P<runtime>[^\n\0]+))?"
)
_LIBRARY = "nf4/lib/libnf4.so.0"


def read(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {each: archive.read(each) for each in archive.namelist() if not each.endswith("/")}


def one(files: dict[str, bytes], end: str) -> str:
    """The name of the one file that ends so."""
    found = [name for name in files if name.endswith(end)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} files of the wheel end with {end}")
    return found[0]


def field(metadata: str, name: str) -> str:
    found = re.search(rf"^{name}: (.*)$", metadata, re.MULTILINE)
    if found is None:
        raise ValueError(f"METADATA has no {name}")
    return found[1]


def list_of(files: dict[str, bytes]) -> bytes:
    """The document, without a time: of one wheel it is always the same."""
    metadata = files[one(files, ".dist-info/METADATA")].decode()
    name, version = field(metadata, "Name"), field(metadata, "Version")
    build = _BUILD.search(files[one(files, _LIBRARY)])
    if build is None:
        raise ValueError(f"{_LIBRARY} does not say how it was built")
    compilers = {"compiler": build["compiler"], "nvcc": build["nvcc"]}
    main: dict[str, Any] = {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "licenses": [{"expression": field(metadata, "License-Expression")}],
        "properties": [{"name": each, "value": said.decode()} for each, said in compilers.items()],
        "components": [
            {
                "type": "file",
                "name": each,
                "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(files[each]).hexdigest()}],
            }
            for each in sorted(files)
            if not each.endswith((".dist-info/RECORD", ".cdx.json"))
        ],
    }
    cuda = build["runtime"]
    runtime = {
        "type": "library",
        "bom-ref": "cuda-runtime",
        "name": "CUDA runtime, static",
        "version": cuda and cuda.decode(),
        "supplier": {"name": "NVIDIA"},
        "licenses": [{"license": {"name": "NVIDIA CUDA Toolkit End User License Agreement"}}],
    }
    linked = [runtime] if cuda else []
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": main},
        "components": linked,
        "dependencies": [{"ref": name, "dependsOn": [each["bom-ref"] for each in linked]}],
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def record_of(files: dict[str, bytes], record: str) -> bytes:
    lines = []
    for name in sorted(files.keys() - {record}):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=")
        lines.append(f"{name},sha256={digest.decode()},{len(files[name])}\n")
    return "".join([*lines, f"{record},,\n"]).encode()


def with_list(files: dict[str, bytes]) -> dict[str, bytes]:
    record = one(files, ".dist-info/RECORD")
    path = record.replace("RECORD", "sboms/libnf4.cdx.json")
    files = {**files, path: list_of(files)}
    return {**files, record: record_of(files, record)}


def add(wheel: Path) -> None:
    """Other files, and all times and modes, stay as they are."""
    files = with_list(read(wheel))
    whole = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as new:
        known = {each.filename: each for each in old.infolist()}
        like = known[one(files, ".dist-info/METADATA")]
        for name, content in files.items():
            info = known.get(name)
            if info is None:
                info = zipfile.ZipInfo(name, like.date_time)
                info.external_attr = like.external_attr
            info.compress_type = zipfile.ZIP_DEFLATED
            new.writestr(info, content)
    os.replace(whole, wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("wheel", type=Path)
    options = parser.parse_args()
    if not options.check:
        add(options.wheel)
        return
    files = read(options.wheel)
    wanted = with_list(files)
    record = one(files, ".dist-info/RECORD")
    wrong = [name for name in wanted if name != record and files.get(name) != wanted[name]]
    # The order of its lines is free.
    if sorted(files[record].splitlines()) != sorted(wanted[record].splitlines()):
        wrong.append(record)
    if wrong:
        sys.exit(f"{options.wheel.name}: {', '.join(wrong)} is not of the wheel's files")


if __name__ == "__main__":
    main()
