"""A server with OpenAI's interface over one engine.

The way of a request: `app` routes it, `fields` checks it, `stepper` hands it to the thread that
owns the engine, `parser` tells reasoning and tool calls from content, `replies` writes the answer.
Where there are replicas, `gateway` stands before them, `placement` chooses one and `ray` runs them.
"""

from __future__ import annotations
