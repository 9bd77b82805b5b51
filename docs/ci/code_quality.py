"""Turns a SARIF report of pediag into the Code Quality report of GitLab: python code_quality.py pediag.sarif."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SEVERITIES = {"error": "critical", "warning": "major", "note": "info"}


def entry(result: dict[str, Any]) -> dict[str, Any]:
    """One finding, as GitLab lists it; its fingerprint is the one of pediag."""
    place = result["locations"][0]["physicalLocation"]
    return {
        "description": result["message"]["text"],
        "check_name": result["ruleId"],
        "fingerprint": "-".join(result["partialFingerprints"].values()),
        "severity": SEVERITIES[result["level"]],
        "location": {
            "path": place["artifactLocation"]["uri"],
            "lines": {"begin": place.get("region", {}).get("startLine", 1)},
        },
    }


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["runs"]
    json.dump([entry(result) for run in runs for result in run["results"]], sys.stdout, indent=2)
