"""Replicas on Ray Serve; needs Ray, and some minutes (make test-cluster)."""

from __future__ import annotations

import http.client
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from hybridspec import LLM, SamplingParams

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "tests/helpers/cluster_app.py"
START_S = 300


class Cluster:
    """A server with replicas, in a process of its own.

    Args:
        process: that process.
        url: where it answers.
    """

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=300)

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def wait_ready(self) -> None:
        self.wait_for(lambda: self.get("/ready")[0] == 200)

    def wait_for(self, is_so: Callable[[], bool], seconds: float = START_S) -> None:
        ends = time.monotonic() + seconds
        while not is_so():
            assert self.process.poll() is None and time.monotonic() < ends
            time.sleep(0.2)

    def values(self, name: str, label: str) -> dict[str, float]:
        """The values of a metric by one of its labels."""
        return {
            sample.labels[label]: sample.value
            for family in text_string_to_metric_families(self.get("/metrics")[1])
            for sample in family.samples
            if sample.name == name
        }

    @property
    def replicas(self) -> set[str]:
        return set(self.values("vllm:generation_tokens_total", "replica"))

    def ask(self, prompt: str, **options: Any) -> str:
        fields = {"model": "small", "temperature": 0, "max_tokens": 20, **options}
        return self.client.completions.create(prompt=prompt, **fields).choices[0].text

    def stream(self, prompt: str, **options: Any) -> str:
        fields = {"model": "small", "temperature": 0, "max_tokens": 20, **options}
        chunks = self.client.completions.create(prompt=prompt, stream=True, **fields)
        return "".join(chunk.choices[0].text for chunk in chunks)


def offline(folder: Path, prompts: list[str], max_tokens: int) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return [r.outputs[0].text for r in LLM(folder, device="cpu").generate(prompts, params)]


def descendants(pid: int) -> list[int]:
    """Every process that a process started, by way of others too."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = list(children.get(pid, []))
    for one in found:
        found += children.get(one, [])
    return found


def replica_processes(pid: int) -> list[int]:
    def title(one: int) -> bytes:
        try:
            return Path(f"/proc/{one}/cmdline").read_bytes()
        except OSError:
            return b""

    return [one for one in descendants(pid) if b"ServeReplica:hybridspec:Replica" in title(one)]


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    command = [sys.executable, "-m", "hybridspec", "serve", "--replicas", "2", "--port", "0",
               "--device", "cpu", "--model", str(folder), "--served-model-name", "small",
               "--drain", "120"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address = process.stderr.readline().removeprefix("listening on ").strip()
            found = Cluster(process, address)
            assert found.get("/ready")[0] == 503  # it answers while they start
            found.wait_ready()
            yield found
            found.client.close()
        finally:
            process.kill()


def test_a_prefix_stays_with_its_replica(cluster: Cluster, folder: Path) -> None:
    prompts = [f"class Thing{i}:\n    def " for i in range(6)]
    right = offline(folder, prompts, 20)
    for _ in range(4):
        assert [cluster.ask(prompt) for prompt in prompts] == right
    counts = cluster.values("hybridspec:routed_requests_total", "prefix")
    assert counts == {"first": 6, "kept": 18, "moved": 0}
    requests = cluster.values("vllm:request_generation_tokens_count", "replica")
    assert len(requests) == 2 and sum(requests.values()) == 24
    assert all(count % 4 == 0 for count in requests.values())  # each prefix with one of them
    assert set(cluster.values("vllm:num_requests_running", "engine")) == {"0", "1"}
    assert cluster.get("/load")[1] == '{"server_load":0}'


def test_one_killed_under_load(cluster: Cluster, folder: Path) -> None:
    """Its streams say so, what was not begun is answered by the other one, which goes on."""
    prompts = [f"def function_{i}(self, " for i in range(24)]
    right = offline(folder, prompts, 300)
    begun = Counter[int]()
    before = cluster.replicas

    def stream(i: int) -> str:
        if i >= 16:  # not streamed: nothing is sent before the end
            return cluster.ask(prompts[i], max_tokens=300)
        chunks = cluster.client.completions.create(
            model="small", prompt=prompts[i], max_tokens=300, temperature=0, stream=True
        )
        text = ""
        try:
            for chunk in chunks:
                begun[i] += 1
                text += chunk.choices[0].text
        except openai.APIError as error:
            assert "the replica that answered has ended" in str(error) and begun[i]
            return "lost"
        return text

    with ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(stream, i) for i in range(24)]
        while len(begun) < 16:
            assert not any(one.done() for one in answers)
            time.sleep(0.01)
        os.kill(replica_processes(cluster.process.pid)[0], signal.SIGKILL)
        found = [one.result() for one in answers]
    lost = [i for i, text in enumerate(found) if text == "lost"]
    assert lost and max(lost) < 16
    assert all(text == right[i] for i, text in enumerate(found) if i not in lost)
    assert len(lost) < 16  # the others did not notice
    cluster.wait_for(lambda: len(cluster.replicas) == 2 and cluster.replicas != before)
    assert cluster.ask(prompts[0], max_tokens=300) == right[0]


def test_a_rolling_restart(cluster: Cluster, folder: Path) -> None:
    """SIGHUP replaces both, one after the other; no request fails."""
    prompts = [f"import module_{i}\n" for i in range(4)]
    right = offline(folder, prompts, 20)
    before, is_over, answered = cluster.replicas, threading.Event(), Counter[int]()

    def go_on(i: int) -> None:
        while not is_over.is_set():
            assert (cluster.ask if i % 2 else cluster.stream)(prompts[i]) == right[i]
            answered[i] += 1

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(go_on, i) for i in range(4)]
        cluster.process.send_signal(signal.SIGHUP)
        try:
            cluster.wait_for(lambda: len(now := cluster.replicas) == 2 and not now & before)
        finally:
            is_over.set()
        for worker in workers:
            worker.result()
    assert min(answered.values()) > 0 and len(answered) == 4


def test_clients_that_leave(cluster: Cluster) -> None:
    """Streaming or not; nothing of them stays."""
    for i in range(10):
        stream = cluster.client.completions.create(
            model="small", prompt=f"x{i}", max_tokens=2000, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        stream.close()
        with pytest.raises(openai.APITimeoutError):
            cluster.client.with_options(timeout=0.2).completions.create(
                model="small", prompt=f"x{i}", max_tokens=2000, extra_body={"ignore_eos": True}
            )
    cluster.wait_for(lambda: cluster.get("/load")[1] == '{"server_load":0}', 30)
    cluster.wait_for(lambda: not any(cluster.values("hybridspec:slots_used", "replica").values()))


def test_the_end(cluster: Cluster) -> None:
    """What runs finishes, new requests are turned away, and no process stays."""
    started = descendants(cluster.process.pid)
    assert len(replica_processes(cluster.process.pid)) == 2
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(cluster.stream, "import", max_tokens=400)
        cluster.wait_for(lambda: cluster.get("/load")[1] == '{"server_load":1}')
        cluster.process.send_signal(signal.SIGTERM)
        assert running.result()
    assert cluster.process.wait(timeout=120) == 0
    assert cluster.process.stderr.read() == ""
    ends = time.monotonic() + 30
    while left := [one for one in started if is_alive(one)]:
        assert time.monotonic() < ends, left
        time.sleep(0.2)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_cluster_scales_down(folder: Path) -> None:
    """`app` on Serve's own proxy; what runs on the replica that goes is finished."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    prompts = [f"def g{i}(" for i in range(8)]
    right = offline(folder, prompts, 200)
    command = [sys.executable, str(SCRIPT), str(folder), str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            assert wait_line(process) == "running 2"
            cluster = Cluster(process, f"http://127.0.0.1:{port}")
            assert len(cluster.replicas) == 2
            with ThreadPoolExecutor(8) as pool:
                answers = [pool.submit(cluster.stream, text, max_tokens=200) for text in prompts]
                cluster.wait_for(lambda: cluster.get("/load")[1] == '{"server_load":8}')
                process.stdin.write("1\n")
                process.stdin.flush()
                assert [one.result() for one in answers] == right
            assert wait_line(process) == "running 1"
            cluster.wait_for(lambda: len(cluster.replicas) == 1)
            assert cluster.ask(prompts[0], max_tokens=200) == right[0]
            with pytest.raises(openai.NotFoundError, match="model: expected 'small'"):
                cluster.client.completions.create(model="other", prompt="a")
            cluster.client.close()
            process.stdin.close()
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()


def wait_line(process: subprocess.Popen[str]) -> str:
    """The next line that the script itself printed; Ray prints others."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("running"):
            return line.strip()
    raise AssertionError("the script ended")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Ray itself imports
def test_the_config_file_in_deploy() -> None:
    """Its arguments are taken, and options of deployments reach them as they are."""
    [given] = yaml.safe_load((ROOT / "deploy/ray.yaml").read_text())["applications"]
    module, name = given["import_path"].split(":")
    build = getattr(importlib.import_module(module), name)
    args = given["args"]
    args["replicas"] |= {"placement_group_bundles": [{"CPU": 1, "GPU": 1}]}
    front = build(args)._bound_deployment
    behind = front.init_args[0]._bound_deployment
    assert front.name == "Front" and behind.name == "Replica"
    assert behind._replica_config.placement_group_bundles == [{"CPU": 1, "GPU": 1}]
    assert behind._deployment_config.autoscaling_config.max_replicas == 4
    assert behind._deployment_config.graceful_shutdown_timeout_s == 65
    with pytest.raises(ValueError, match="unknown"):
        build({"unknown": 1})
