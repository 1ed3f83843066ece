"""A server with OpenAI's interface over one engine.

The way of a request: `app` routes it, `fields` checks it, `stepper` hands it to the thread that
owns the engine, `parser` tells reasoning and tool calls from content, `replies` writes the answer.
"""

from __future__ import annotations
