"""Tools of a request, and the beginning of a turn that has to call one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybridspec.serve.errors import ApiError

__all__ = ["forced_call", "forced_name", "function_schemas"]


def function_schemas(tools: Any) -> dict[str, Mapping[str, Any]] | None:
    """Return the parameters' schema of each function by name; None without tools."""
    if tools is None:
        return None
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type", "function") != "function" or not isinstance(name, str) or not name:
            raise ApiError(400, "tools: expected functions with a name", param="tools")
        parameters = function.get("parameters")
        found[name] = parameters if isinstance(parameters, dict) else {}
    return found


def forced_name(choice: Any, names: Mapping[str, Any] | None) -> str | None:
    """Return the function that has to be called, None where there is none such."""
    if choice in (None, "none", "auto", "required"):
        if choice == "required" and not names:
            raise ApiError(400, "tool_choice: expected tools with it", param="tool_choice")
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str) or name not in (names or {}):
        raise ApiError(
            400, "tool_choice: expected auto, none, required or one of tools", param="tool_choice"
        )
    return name


def forced_call(choice: str | None, *, has_xml: bool) -> str:
    """Return how a turn that has to be a call begins.

    Args:
        choice: the function; None leaves it to the model.
        has_xml: whether the model writes calls as tags, not as JSON.
    """
    if has_xml:
        return "<tool_call>\n<function=" + ("" if choice is None else f"{choice}>\n")
    name = '<tool_call>\n{"name": "'
    return name if choice is None else f'{name[:-1]}{json.dumps(choice)}, "arguments": '
