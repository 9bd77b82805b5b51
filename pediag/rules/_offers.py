"""The patch of a config finding, made from its edits and offered only where it makes the finding go away."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from pediag.rules.finding import Finding
from pediag.rules.rule import Facets, NotApplicable, Rule
from pediag.targets import Config, understood
from pediag.targets.editing import CannotEdit, diff, edited


def offered(rule: Rule, finding: Finding, facets: Facets) -> Finding:
    """``finding`` with the unified diff of its edits as its patch.

    Without edits where the config has no text, it cannot be edited, or the rule would say the same of the new one.
    """
    config, fix = facets.config, finding.fix
    if not fix.edits:
        return finding
    if config is None or not config.text:
        return replace(finding, fix=replace(fix, edits=()))
    try:
        text = edited(config.text, fix.edits)
    except CannotEdit as error:
        return replace(
            finding, fix=replace(fix, patch=None, edits=(), summary=f"{fix.summary} No patch: {error}.")
        )
    if rule.needs == ("config",) and _stays(rule, finding, facets, text):
        return replace(finding, fix=replace(fix, applicability="manual", patch=None, edits=()))
    patch = diff(config.text, text, os.path.basename(config.source or "config.json"))
    return replace(finding, fix=replace(fix, patch=patch))


def _stays(rule: Rule, finding: Finding, facets: Facets, text: str) -> bool:
    """Whether the rule still finds something at the same place of the edited config."""
    old = facets.config
    assert old is not None
    config = understood(Config(json.loads(text), old.source, typed=old.typed))
    again = Facets(seq_len=facets.seq_len, train_len=facets.train_len, dtype=facets.dtype, config=config)
    try:
        return any(other.where.module == finding.where.module for other in rule.check(again))
    except NotApplicable:
        return False
