"""Runs a model with content abstract and positions concrete, and records where positions enter."""

from __future__ import annotations

from pediag.trace.evaluate import Away, Evaluator, Lane, Unavailable
from pediag.trace.failures import Failure
from pediag.trace.frames import Frame
from pediag.trace.graph import Attention, Dropout, Graph, Node, Provenance, Site, Transfer, ancestors
from pediag.trace.inputs import positions
from pediag.trace.session import Session, Trace

__all__ = [
    "Attention",
    "Away",
    "Dropout",
    "Evaluator",
    "Failure",
    "Frame",
    "Graph",
    "Lane",
    "Node",
    "Provenance",
    "Session",
    "Site",
    "Trace",
    "Transfer",
    "Unavailable",
    "ancestors",
    "positions",
]
