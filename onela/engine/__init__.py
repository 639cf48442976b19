"""Requests, scheduling, running, and the engine that ties them together."""

from onela.engine.engine import Engine
from onela.engine.request import RecommendedItem, Request, Result, Timings, Usage

__all__ = ["Engine", "RecommendedItem", "Request", "Result", "Timings", "Usage"]
