"""`lorazor serve`: how its arguments are built from those of vLLM, then one real server with a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from lorazor.features.errors import InputError
from lorazor.runtime.serve import allow_plugins, merge_options, parse_vllm, prepare, split_flags
from tests.runtime.policies import make_policy, safe_from_step
from tests.runtime.serving import add_tokenizer, write_adapter_folder
from tests.runtime.tiny import Tiny, make_tiny

PROGRAM = Path(sys.executable).with_name("lorazor")
LEARNED_STEP = 16
"""The policy of these tests says "safe" from this decode step on, a multiple of its probe interval."""


def test_split_flags_leaves_vllms_arguments_in_order() -> None:
    """Our flags are taken out wherever they stand; everything else keeps its order, short flags included."""
    argv = ["--port", "1", "M", "--policy", "P", "-tp", "2", "--pin", "a", "b", "--dtype=half", "--pin", "c", "-O3"]
    options, rest = split_flags(argv)
    assert options == {"policy": "P", "pinned": ["a", "b", "c"]}
    assert rest == ["--port", "1", "M", "-tp", "2", "--dtype=half", "-O3"]


@pytest.mark.parametrize("spelling", ["--release-fraction=0.05", "--release_fraction=0.05"])
def test_split_flags_takes_both_spellings(spelling: str) -> None:
    """As vLLM does, we take underscores for dashes."""
    assert split_flags(["M", spelling]) == ({"release_fraction": 0.05}, ["M"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["M", "--release-fraction", "1.5"], ["--release-fraction", "0 to 1", "1.5"]),
        (["M", "--release-fraction", "nan"], ["--release-fraction", "nan"]),
        (["M", "--release-fraction", "half"], ["release-fraction", "half"]),
        (["M", "--policy"], ["--policy"]),
        (["M", "--pin"], ["--pin"]),
    ],
)
def test_split_flags_refuses(argv: list[str], words: list[str]) -> None:
    """A wrong value of ours is one sentence that names the flag and the value."""
    with pytest.raises(InputError) as caught:
        split_flags(argv)
    assert all(word in str(caught.value) for word in words)


def test_allow_plugins_keeps_the_users_list() -> None:
    """VLLM_PLUGINS gains lorazor once and loses nobody; an empty list stays a list of one."""
    environment = {"VLLM_PLUGINS": "mine,other"}
    allow_plugins(environment)
    allow_plugins(environment)
    assert environment["VLLM_PLUGINS"] == "mine,other,lorazor"
    environment = {"VLLM_PLUGINS": ""}
    allow_plugins(environment)
    assert environment["VLLM_PLUGINS"] == "lorazor"


@pytest.mark.vllm
def test_allow_plugins_names_all_that_would_have_loaded() -> None:
    """Without the variable vLLM loads every plugin: naming ours must not switch those of others off."""
    environment: dict[str, str] = {}
    allow_plugins(environment)
    names = environment["VLLM_PLUGINS"].split(",")
    assert "lorazor" in names
    assert "lora_filesystem_resolver" in names


@pytest.mark.vllm
def test_parse_vllm_reads_what_vllm_serve_reads(tmp_path: Path) -> None:
    """Positional model, short and dotted flags and a YAML file come out as `vllm serve` has them."""
    (tmp_path / "c.yaml").write_text("port: 8123\nmax-num-seqs: 7\n")
    argv = ["some/model", "-tp", "2", "--config", str(tmp_path / "c.yaml"), "--additional-config.other.deep", "3"]
    args = parse_vllm([*argv, "--lora-modules", "a=x", "b=y"])
    assert (args.model, args.tensor_parallel_size, args.port, args.max_num_seqs) == ("some/model", 2, 8123, 7)
    assert [(m.name, m.path) for m in args.lora_modules] == [("a", "x"), ("b", "y")]
    assert args.additional_config == {"other": {"deep": 3}}
    assert (args.max_loras, args.max_lora_rank) == (None, None)
    assert parse_vllm(["m", "--max-loras", "1"]).max_loras == 1


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "8000"], "no model"),
        (["m", "--config", "/none/c.yaml"], "c.yaml"),
        (["m", "--enable-auto-tool-choice"], "--tool-call-parser"),
    ],
)
def test_parse_vllm_refuses(argv: list[str], words: str) -> None:
    """A missing model is not replaced by one of vLLM's choice, and vLLM's own refusals become sentences."""
    with pytest.raises(InputError, match=words):
        parse_vllm(argv)


@pytest.mark.vllm
def test_merge_options_keeps_what_the_user_wrote() -> None:
    """Flags win over the same key in --additional-config; its other keys, ours and others', stay."""
    user = json.dumps({"other": 1, "lorazor": {"release_fraction": 0.5, "policy_timeout": 2.0}})
    args = parse_vllm(["m", "--additional-config", user])
    ours = merge_options(args, {"release_fraction": 0.05})
    assert ours == {"release_fraction": 0.05, "policy_timeout": 2.0}
    assert args.additional_config == {"other": 1, "lorazor": ours}


@pytest.mark.vllm
def test_merge_options_asks_for_lorazor_without_any_flag() -> None:
    """`lorazor serve` without a policy still turns the runtime on, so that requests can ask for a release."""
    args = parse_vllm(["m"])
    merge_options(args, {})
    assert args.additional_config == {"lorazor": {}}


@pytest.mark.vllm
def test_merge_options_refuses_an_unknown_key() -> None:
    """A typo in additional_config's own part is told before the engine starts."""
    args = parse_vllm(["m", "--additional-config", '{"lorazor": {"relase_fraction": 0.5}}'])
    with pytest.raises(InputError, match="relase_fraction"):
        merge_options(args, {})


@dataclass(frozen=True)
class Served:
    """A running `lorazor serve`."""

    url: str
    tiny: Tiny
    policy: Path
    log: Path


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    """The environment of a user: without what the other tests set for engines in their own process."""
    return {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny model with a tokenizer and three adapters, one of a rank above vLLM's default limit."""
    made = make_tiny(tmp_path_factory.mktemp("served"), {"a": 8, "b": 16, "c": 32})
    add_tokenizer(made.base)
    return made


@pytest.fixture(scope="module")
def policy(model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that knows adapters a and b and releases at the first decision from LEARNED_STEP on."""
    return Path(make_policy(tmp_path_factory.mktemp("policy") / "p", model, safe_from_step(LEARNED_STEP)))


@pytest.mark.vllm
def test_prepare_checks_and_completes(model: Tiny, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call takes a command line to arguments that vLLM can start from, and says what it set and found."""
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    lines: list[str] = []
    modules = [f"{name}={path}" for name, path in model.adapters.items()]
    args = prepare(
        [model.base, "--policy", str(policy), "--pin", "b", "--port", str(free_port()), "--lora-modules", *modules],
        lines.append,
    )
    assert args.additional_config == {"lorazor": {"policy": str(policy), "pinned": ["b"]}}
    assert (args.enable_lora, args.max_loras, args.max_lora_rank) == (True, 3, 32)
    assert "adapter a: task open, threshold 0.9" in lines
    assert "adapter c: not known to the policy, never released" in lines
    assert os.environ["VLLM_PLUGINS"] == "lorazor"


def test_prepare_looks_at_the_artifact_before_it_imports_vllm(tmp_path: Path) -> None:
    """A policy that is not there is told at once, by a process that never loaded vLLM."""
    program = (
        "import sys\nfrom lorazor.features.errors import InputError\nfrom lorazor.runtime.serve import prepare\n"
        "try:\n    prepare(['m', '--policy', sys.argv[1]], print)\n"
        "except InputError as error:\n    print(error, 'vllm' in sys.modules)\n"
    )
    missing = str(tmp_path / "nowhere")
    run = subprocess.run([sys.executable, "-P", "-c", program, missing], capture_output=True, text=True, check=True)
    assert missing in run.stdout
    assert run.stdout.strip().endswith("False")


def lorazor(*argv: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The installed program, as a user runs it."""
    return subprocess.run([PROGRAM, *argv], capture_output=True, text=True, timeout=timeout, env=environment())


def test_bad_artifact_stops_the_start(tmp_path: Path) -> None:
    """Exit code 2 and one sentence on stderr, nothing else."""
    (tmp_path / "policy.json").write_text("{")
    run = lorazor("serve", "m", "--policy", str(tmp_path))
    assert run.returncode == 2
    assert re.fullmatch(r"lorazor: .*policy\.json.*\n", run.stderr)
    assert run.stdout == ""


@pytest.mark.vllm
@pytest.mark.slow
def test_port_in_use_stops_the_start(model: Tiny) -> None:
    """The port is tried before the engine starts, and the sentence names it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        run = lorazor("serve", model.base, "--host", "127.0.0.1", "--port", port)
    assert run.returncode == 2
    assert (
        run.stderr.splitlines()[-1]
        == f"lorazor: 127.0.0.1:{port} is in use by another program: choose another with --port"
    )


@pytest.mark.vllm
@pytest.mark.slow
def test_adapter_without_weights_stops_the_start(model: Tiny, tmp_path: Path) -> None:
    """An adapter folder that holds no weights is named before the engine starts."""
    folder = write_adapter_folder(tmp_path / "x", config={"r": 8}, weights=False)
    run = lorazor("serve", model.base, "--lora-modules", f"x={folder}", "--port", str(free_port()))
    assert run.returncode == 2
    assert f"x={folder}: the folder holds no weights" in run.stderr.splitlines()[-1]


@pytest.mark.vllm
@pytest.mark.slow
def test_refusal_of_the_engine_is_a_sentence(model: Tiny) -> None:
    """What the plugin refuses while vLLM builds its configuration also ends in one sentence and exit code 2."""
    run = lorazor("serve", model.base, "--port", str(free_port()))
    assert run.returncode == 2
    assert "--enable-lora" in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr


@pytest.fixture(scope="module")
def served(model: Tiny, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests below; it must also stop cleanly on Ctrl-C."""
    port, log = free_port(), tmp_path_factory.mktemp("log") / "server.log"
    command = [str(PROGRAM), "serve", model.base, "--policy", str(policy)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--pin", "pinned", "--served-model-name", "base"]
    command += ["--max-model-len", "256", "--max-num-seqs", "16", "--enforce-eager"]
    modules = {**model.adapters, "pinned": model.adapters["a"]}
    command += ["--lora-modules", *(f"{name}={path}" for name, path in modules.items())]
    with log.open("w") as out:
        process = start(command, out)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", process, log)
        yield Served(f"http://127.0.0.1:{port}", model, policy, log)
    finally:
        code = interrupt(process)
    assert code in (0, 130), log.read_text()[-3000:]


def start(command: list[str], log: IO[str]) -> subprocess.Popen[bytes]:
    """A program in a process group of its own, as a terminal starts it."""
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment(), start_new_session=True)


def interrupt(process: subprocess.Popen[bytes], seconds: float = 60) -> int:
    """Press Ctrl-C, which reaches every process of the group; the exit code, once nothing of the group is left."""
    deadline = time.monotonic() + seconds
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        code = process.wait(seconds)
        while True:
            os.killpg(process.pid, 0)
            assert time.monotonic() < deadline, "a child of the server is still there"
            time.sleep(0.2)
    except ProcessLookupError:
        return code
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


@pytest.mark.vllm
@pytest.mark.slow
def test_ctrl_c_while_the_engine_starts(model: Tiny, policy: Path, tmp_path: Path) -> None:
    """Ctrl-C before the server listens ends it soon, with the code of an interrupt and no process left behind."""
    log = tmp_path / "log"
    argv = ["serve", model.base, "--policy", str(policy), "--port", str(free_port()), "--lora-modules"]
    with log.open("w") as out:
        process = start([str(PROGRAM), *argv, f"a={model.adapters['a']}"], out)
    deadline = time.monotonic() + 120
    while "Initializing a V1 LLM engine" not in log.read_text():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert interrupt(process, 30) == 130, log.read_text()[-3000:]


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 300) -> None:
    """Return when GET /health is answered; fail with the end of the log if the server stops or takes too long."""
    import httpx

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-5000:]
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    pytest.fail(f"no server after {seconds} s: {log.read_text()[-5000:]}")


def complete(served: Served, adapter: str, xargs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """One greedy completion of 40 tokens."""
    import httpx

    body = {"model": adapter, "prompt": "the quick brown fox", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{served.url}/v1/completions", json={**body, "vllm_xargs": xargs, **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def request_report(served: Served, request_id: str) -> dict[str, Any]:
    """What GET /lorazor/requests/{id} says."""
    import httpx

    answer = httpx.get(f"{served.url}/lorazor/requests/{request_id}", timeout=30)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.vllm
@pytest.mark.slow
class TestServer:
    """The HTTP side of a real server with a policy."""

    def test_release_by_policy(self, served: Served) -> None:
        """The policy releases where it learned to, and both the response and the endpoint say so."""
        answer = complete(served, "a")
        expected = LEARNED_STEP + 2
        assert answer["kv_transfer_params"]["lorazor"]["release_step"] == expected
        report = request_report(served, answer["id"])
        assert report["release_step"] == expected
        assert (report["adapter"], report["task"], report["arm"]) == ("a", "open", "policy")
        assert report["score"] >= 0.9
        never = complete(served, "a", {"lorazor_release": "never"})
        text, kept = answer["choices"][0]["text"], never["choices"][0]["text"]
        assert text[:expected] == kept[:expected]
        assert text != kept

    def test_forced_release(self, served: Served) -> None:
        """`lorazor_release` forces the step, for an adapter that the policy does not know too; base, never differ."""
        answers = {r: complete(served, "c", {"lorazor_release": r}) for r in ("never", 1, 7)}
        texts = [answer["choices"][0]["text"] for answer in answers.values()]
        texts.append(complete(served, "base")["choices"][0]["text"])
        assert len(set(texts)) == 4
        assert texts[2][:7] == texts[0][:7]
        assert answers[7]["kv_transfer_params"]["lorazor"]["release_step"] == 7

    def test_pinned_adapter_stays(self, served: Served) -> None:
        """A pinned adapter is never released, whatever the policy or the request says."""
        free, pinned = complete(served, "a", {"lorazor_release": "never"}), complete(served, "pinned")
        assert pinned["choices"][0]["text"] == free["choices"][0]["text"]
        report = request_report(served, complete(served, "pinned", {"lorazor_release": 1})["id"])
        assert (report["arm"], report["release_step"]) == ("pinned", None)

    def test_stream_and_its_release_step(self, served: Served) -> None:
        """A stream of the OpenAI client gives the same text, and the endpoint tells its release step afterwards."""
        import openai

        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
        message: Any = [{"role": "user", "content": "the quick brown fox"}]
        extra = {"ignore_eos": True, "vllm_xargs": {"lorazor_release": 5}}
        options: Any = {"model": "a", "messages": message, "max_tokens": 20, "temperature": 0, "extra_body": extra}
        chunks = list(client.chat.completions.create(**options, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        whole = client.chat.completions.create(**options)
        assert text == whole.choices[0].message.content
        report = request_report(served, chunks[0].id)
        assert (report["release_step"], report["arm"], report["output_tokens"]) == (5, "forced", 20)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("path", ["completions", "chat/completions"])
    def test_bad_xargs_are_400(self, served: Served, path: str, stream: bool) -> None:
        """A wrong option is HTTP 400 with the sentence, for streams as well."""
        import httpx

        body: dict[str, Any] = {"model": "a", "max_tokens": 4, "stream": stream, "vllm_xargs": {"lorazor_release": 0}}
        body |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
        answer = httpx.post(f"{served.url}/v1/{path}", json=body, timeout=30)
        assert answer.status_code == 400
        assert "lorazor_release must be" in answer.json()["error"]["message"]

    def test_escaped_xargs_meet_the_second_gate(self, served: Served) -> None:
        """A key hidden from the first gate by JSON escapes is refused by the guard of the input processor."""
        import httpx

        body = rb'{"model": "a", "prompt": "x", "max_tokens": 4, "vllm_xargs": {"\u006corazor_release": 0}}'
        head = {"content-type": "application/json"}
        answer = httpx.post(f"{served.url}/v1/completions", content=body, headers=head, timeout=30)
        assert answer.status_code == 400
        assert "lorazor_release must be" in answer.json()["error"]["message"]

    def test_status(self, served: Served) -> None:
        """The status names the policy in force, the pins, g and the counts."""
        import httpx

        complete(served, "a")
        status = httpx.get(f"{served.url}/lorazor/status", timeout=30).json()
        assert status["config"]["pinned"] == ["pinned"]
        assert status["policy"]["tasks"]["open"]["threshold"] == 0.9
        assert status["policy"]["probe_interval"] == 4
        assert ["lorazor_releases_total", {"adapter": "a", "task": "open", "arm": "policy"}] in [
            count[:2] for count in status["counts"]
        ]

    def test_unknown_request_is_404(self, served: Served) -> None:
        """A wrong id is told so."""
        import httpx

        assert httpx.get(f"{served.url}/lorazor/requests/chatcmpl-none", timeout=30).status_code == 404

    def test_metrics(self, served: Served) -> None:
        """Releases, release steps, active rows and probes arrive on /metrics, and vLLM's own label stays clean."""
        before = samples(served)
        complete(served, "a")
        after = samples(served)

        def grown(name: str, **labels: str) -> float:
            key = (name, tuple(sorted(labels.items())))
            return after.get(key, 0.0) - before.get(key, 0.0)

        labels = {"adapter": "a", "task": "open"}
        assert grown("lorazor_requests_total", **labels, arm="policy") == 1
        assert grown("lorazor_releases_total", **labels, arm="policy") == 1
        assert grown("lorazor_release_step_sum", **labels) == LEARNED_STEP + 2
        assert 0 < grown("lorazor_active_rows_total") < grown("lorazor_rows_total")
        assert grown("lorazor_probes_total") > 0
        assert grown("lorazor_probe_seconds_total") > 0
        adapters = [value for name, labels in after if name == "vllm:lora_requests_info" for _, value in labels]
        assert adapters
        assert not any("lorazor" in value for value in adapters)


def samples(served: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of /metrics; statistics of the last step arrive a moment after its response."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    time.sleep(0.5)
    text = httpx.get(f"{served.url}/metrics", timeout=30).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
