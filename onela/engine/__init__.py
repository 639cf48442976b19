"""Requests, scheduling, running, and the engine that ties them together."""

from onela.engine.async_engine import AsyncEngine
from onela.engine.engine import Engine
from onela.engine.request import RecommendedItem, Request, Result, Timings, Usage

__all__ = ["AsyncEngine", "Engine", "RecommendedItem", "Request", "Result", "Timings", "Usage"]
