"""The work that pediag shares with its nearest peer: reading a config's rotary parameters and telling what is wrong.

transformers validates them when a config is read. Both are given the planted faults of ``docs/config-faults.md``;
``python -m benchmarks.peers transformers|pediag`` prints how many of them one of the two signals.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Limit, Row, complaint, interleaved, middle, process, python
from tests.rules.declaration.test_planted_config_faults import CONTROLS, FAULTS, LINEAR, found, tiny

READ = "import sys; from transformers import AutoConfig; AutoConfig.from_pretrained(sys.argv[1])"
PEER = "transformers reads it"
ROUNDS = 5
SECONDS = Limit("measured", 0.5)
CLEAN_OR_NOT = (0, 1)


def rows() -> Iterator[Row]:
    """One config of each: the time of both, and what both say of all that is planted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(tiny(LINEAR)))
        check = [sys.executable, "-m", "pediag", "check", str(path), "--format", "json", "--quiet"]
        taken = interleaved({"peer": [*python(READ), folder], "check": check}, ROUNDS)
    wrong = complaint(taken["check"], CLEAN_OR_NOT)
    peer = None if complaint(taken["peer"]) else middle(taken["peer"])
    measured = None if wrong else middle(taken["check"])
    yield Row("pediag check config.json", measured, peer, PEER, "s", SECONDS, wrong or "with imports")
    yield _planted()


def _planted() -> Row:
    """How many planted faults each signals; what is no fault, or cannot be told from a config, counts for neither."""
    told = {
        who: process([sys.executable, "-m", "benchmarks.peers", who]) for who in ("pediag", "transformers")
    }
    wrong = complaint(list(told.values()))
    counts = {who: None if wrong else float(usage.out.split()[-1]) for who, usage in told.items()}
    seconds = ", ".join(f"{who} {usage.cpu:.1f} s" for who, usage in told.items())
    note = wrong or f"of {len(FAULTS)}; all of them in one process: {seconds}"
    return Row(
        "planted config faults signalled", counts["pediag"], counts["transformers"], PEER, "", None, note
    )


def by_pediag() -> int:
    """How many of the planted faults pediag names with a code of its own."""
    return sum(bool(set(found(planted)) & set(planted.codes)) for planted in FAULTS)


def by_transformers() -> int:
    """How many raise, or log a warning, when transformers reads the config; what it logs of the controls is no sign."""
    usual = {line for planted in CONTROLS for line in _signals(planted.config)}
    return sum(bool(set(_signals(planted.config)) - usual) for planted in FAULTS)


def _signals(config: dict[str, object]) -> list[str]:
    """What transformers says while it reads ``config``."""
    from transformers import AutoConfig
    from transformers.utils import logging as own

    own.set_verbosity_warning()
    own.warning_once.cache_clear()
    kept = _Kept()
    logger = logging.getLogger("transformers")
    logger.addHandler(kept)
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            AutoConfig.from_pretrained(folder)
    except Exception as error:
        kept.lines.append(type(error).__name__)
    finally:
        logger.removeHandler(kept)
    return kept.lines


class _Kept(logging.Handler):
    """Keeps the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith("Model config:"):  # token ids outside of the vocabulary
            self.lines.append(str(record.msg))


if __name__ == "__main__":
    print({"pediag": by_pediag, "transformers": by_transformers}[sys.argv[1]]())
