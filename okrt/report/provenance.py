"""Where a file comes from, in words."""

import json
from collections.abc import Mapping
from typing import Any

MOST_HOSTS = 8
NAMES = {"command": "command", "started_utc": "started", "okrt_version": "okrt", "git_sha": "commit"}


def facts(attributes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of a name and a text; what the file does not say is left out."""
    told = {title: text_of(attributes.get(name)) for name, title in NAMES.items()}
    told["started"] = told["started"].replace("T", " ").replace("+00:00", " UTC")
    told["hosts"] = hosts_text(attributes.get("hostnames"))
    told["MPI"] = text_of(attributes.get("mpi_library"))
    told["data"] = text_of(attributes.get("data"))
    packages = json.loads(attributes.get("packages", "{}"))
    told["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items())
    told["seed"] = text_of(attributes.get("seed"))
    return [(name, text) for name, text in told.items() if text]


def place_text(attributes: Mapping[str, Any]) -> list[str]:
    """On what it was measured, in a sentence, if the file says so."""
    told = dict(facts(attributes))
    if "hosts" not in told:
        return []
    text = f"On {told['hosts']}"
    software = [told["MPI"]] if "MPI" in told else []
    if "okrt" in told:
        commit = f" ({told['commit'][:8]})" if "commit" in told else ""
        software.append(f"okrt {told['okrt']}{commit}")
    if software:
        text += f", with {' and '.join(software)}"
    return [f"{text}, started {told['started']}." if "started" in told else f"{text}."]


def hosts_text(hosts: Any) -> str:
    """Each host once, with the number of its ranks if there are several."""
    if hosts is None:
        return ""
    names = [str(host) for host in hosts] if not isinstance(hosts, str) else [hosts]
    counts = {name: names.count(name) for name in dict.fromkeys(names[:10_000])}
    told = [name if count == 1 else f"{name} (×{count})" for name, count in counts.items()]
    if len(told) > MOST_HOSTS:
        told[MOST_HOSTS:] = [f"… {len(told)} hosts in all"]
    return ", ".join(told)


def text_of(value: Any) -> str:
    return "" if value is None else str(value)
