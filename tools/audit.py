"""Known vulnerabilities of the versions in requirements_lock.txt, without a network.

    python tools/audit.py all.zip

Takes advisories in OSV's format: the archive of PyPI that https://osv.dev offers, or a folder of
such JSON files. Exit code 1: there are some, one a line; 2: there was nothing to go by.
"""

import argparse
import json
import re
import sys
import zipfile
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

LOCK = Path(__file__).resolve().parent.parent / "requirements_lock.txt"


def locked(text):
    """{name: version} of a requirements file with fixed versions."""
    found = re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def advisories(path):
    """Yields the advisories of an archive or folder."""
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            yield json.loads(file.read_bytes())
    else:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield json.loads(archive.read(name))


def is_affected(version, affected):
    """Whether an entry of an advisory's "affected" is about a version of its package."""
    if version in affected.get("versions", ()):
        return True
    for span in affected.get("ranges", ()):
        inside = False
        for event in span["events"] if span["type"] == "ECOSYSTEM" else ():
            ((kind, limit),) = event.items()
            reached = limit == "0" or Version(version) >= Version(limit)
            if kind == "introduced":
                inside = inside or reached
            elif kind == "fixed" or Version(version) != Version(limit):
                inside = inside and not reached
        if inside:
            return True
    return False


def audit(versions, found):
    """(number of advisories about these packages, lines about those that hold for the versions)."""
    count, lines = 0, []
    for advisory in found:
        entries = {}
        for affected in () if "withdrawn" in advisory else advisory.get("affected", ()):
            name = canonicalize_name(affected["package"]["name"])
            if affected["package"]["ecosystem"] == "PyPI" and name in versions:
                entries.setdefault(name, []).append(affected)
        count += bool(entries)
        for name, affected in entries.items():
            if any(is_affected(versions[name], entry) for entry in affected):
                summary = advisory.get("summary") or advisory.get("details", "")
                lines.append(f"{name} {versions[name]}: {advisory['id']}: {summary[:100]}")
    return count, lines


def main():
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("advisories", type=Path, help="archive or folder of OSV's JSON files")
    path = parser.parse_args().advisories
    if not path.exists():
        parser.error(f"{path}: there is no such file or folder")
    versions = locked(LOCK.read_text())
    try:
        count, lines = audit(versions, advisories(path))
    except (zipfile.BadZipFile, ValueError, LookupError, TypeError, AttributeError) as error:
        parser.error(f"{path}: no archive or folder of OSV's advisories ({error!r})")
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(versions)} packages, {count} advisories about them, {len(lines)} that hold")
    sys.exit(2 if count == 0 else bool(lines))


if __name__ == "__main__":
    main()
