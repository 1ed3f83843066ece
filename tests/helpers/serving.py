"""A server that runs in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import openai

from hybridspec import LLM
from hybridspec.serve.api import Api
from hybridspec.serve.app import Server, create_app
from hybridspec.serve.options import ServeOptions

__all__ = ["TEMPLATE", "Running"]

TEMPLATE = """\
{%- for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<function={{ call.function.name }}>\
{{ call.function.arguments | items | list }}{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>
{% if enable_thinking is defined and not enable_thinking %}
</think>

{% endif %}{% endif %}"""


class Running:
    """A server in a thread of this process.

    Attributes:
        url: where it answers.
        llm: its engine, once it is loaded.
    """

    def __init__(self, load: Callable[[], LLM], options: ServeOptions) -> None:
        self.llm: LLM | None = None
        self._clients: list[openai.OpenAI] = []

        def keep() -> LLM:
            self.llm = load()
            return self.llm

        app = create_app(keep, options)
        self.api: Api = app.state.served
        self.server = Server(app, host="127.0.0.1", port=0, drain_s=options.drain_s)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while self.server.address is None or self.api._stepper is None:
            assert self.thread.is_alive() and self.server.failure is None
            time.sleep(0.01)
        host, port = self.server.address
        self.url = f"http://{host}:{port}"

    def client(self, key: str = "none", **options: object) -> openai.OpenAI:
        url = f"{self.url}/v1"
        client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=600, **options)
        self._clients.append(client)
        return client

    def wait_idle(self, seconds: float = 300) -> None:
        """Wait until nothing runs, and see that nothing was left behind."""
        assert self.llm is not None
        ends = time.monotonic() + seconds
        engine, stepper = self.llm._engine, self.api.stepper
        while engine.has_work or engine.allocator.num_live or stepper.num_requests:
            assert time.monotonic() < ends, "requests are left over"
            time.sleep(0.01)

    def end(self) -> None:
        for client in self._clients:
            client.close()
        self.server.end()
        self.thread.join()
