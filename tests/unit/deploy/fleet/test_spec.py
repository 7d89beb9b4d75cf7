"""fleet.yaml: what is accepted, and what the errors say."""

from __future__ import annotations

import pytest

from deploy.fleet.spec import EXAMPLE, HEAD, check_for_ray, parse_spec, read_spec
from radixfleet.settings import SettingsError


def one_model(settings: str = "{model: demo}", **keys: str) -> str:
    lines = "".join(f"    {key}: {value}\n" for key, value in {"workers": "1", "settings": settings, **keys}.items())
    return f"models:\n  m:\n{lines}"


def test_the_example_is_valid_and_says_what_it_is():
    spec = parse_spec(EXAMPLE)
    assert (spec.models["demo"].workers.min, spec.models["demo"].workers.max) == (1, 4)
    assert spec.router_settings(0)["port"] == 7070


def test_a_number_of_workers_stands_for_both_bounds():
    assert str(parse_spec(one_model(workers="3")).models["m"].workers) == "3"
    assert str(parse_spec(one_model(workers="{min: 1, max: 3}")).models["m"].workers) == "1-3"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: [", "fleet.yaml is not YAML: line 1, column 10: expected the node content"),
        ("\tmodels: 3", "is not YAML: line 1, column 1: found character '\\t' that cannot start any token"),
        ("", "`radixfleet fleet init` prints an example"),
        ("{}", "models is missing"),
        ("routers: {}", "models is missing"),
        ("modles: {}", "did you mean models?"),
        (one_model(scalin="{}"), "unknown key models.m.scalin in fleet.yaml; did you mean scaling?"),
        (one_model(scaling="{up_after: 3}"), "did you mean up_after_s"),
        (one_model(workers="{min: 3, max: 2}"), "models.m.workers in fleet.yaml: min must not be above max"),
        (one_model(workers="{min: 0, max: 2}"), "min must be at least 1"),
        (one_model(workers="many"), "must hold min, max; got 'many'"),
        (one_model(workers="true"), "must hold min, max"),
        (one_model(resources="{GPU: -1}"), "models.m.resources.GPU in fleet.yaml must be at least 0"),
        (one_model(resources="{GPU: 1.5}"), "models.m.resources.GPU in fleet.yaml must be a whole number, or a part"),
        ("models: {}", "models in fleet.yaml must name at least one"),
        (one_model() + one_model()[len("models:\n") :], "m is there twice"),
        (one_model("{model: demo, page_size: 16, page_size: 32}"), "page_size is there twice"),
        (one_model("{model: demo, pagesize: 3}"), "pagesize in models.m.settings of fleet.yaml; did you mean page"),
        (one_model("{model: demo, page_size: 3}"), "page_size in models.m.settings of fleet.yaml must divide 64"),
        (one_model("{}"), "model in models.m.settings of fleet.yaml is required"),
        (one_model("{model: demo, routers: [a]}"), "routers in models.m.settings of fleet.yaml is decided by"),
        (one_model("{model: demo, served_model_name: x}"), "served_model_name in models.m.settings"),
        ("routers: {settings: {polcy: sglang}}\n" + one_model(), "did you mean policy?"),
        ("routers: {settings: {metrics_port: 7070}}\n" + one_model(), "routers.settings of fleet.yaml: --port and"),
        ("routers: {count: 0}\n" + one_model(), "routers.count in fleet.yaml must be at least 1"),
        ("models: {router: {workers: 1, settings: {model: demo}}}", "not 'router'"),
        ("models: {'a b': {workers: 1, settings: {model: demo}}}", "name a model by letters"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_place_and_what_to_do(text, said):
    with pytest.raises(SettingsError) as refused:
        parse_spec(text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("routers", "model", "missing"),
    [
        ("admin_token: '@/token'", "", "admin_token is missing in models.m.settings of fleet.yaml: routers.settings"),
        ("", "admin_token: '@/token'", "admin_token is missing in routers.settings of fleet.yaml: models.m.settings"),
        ("tls_cert: /a, tls_key: /a", "", "tls_ca is missing in models.m.settings"),
        ("", "tls_cert: /a, tls_key: /a", "tls_ca is missing in routers.settings"),
        ("tls_cert: /a, tls_key: /a, tls_client_ca: /c", "tls_ca: /c", "tls_cert is missing in models.m.settings"),
        ("tls_ca: /c", "tls_cert: /a, tls_key: /a, tls_client_ca: /c", "tls_cert is missing in routers.settings"),
        ("tls_ca: /c", "tls_cert: /a, tls_key: /a, tls_ca: /c", "tls_cert is missing in routers.settings"),
        ("tls_cert: /a, tls_key: /a, tls_ca: /c", "tls_ca: /c", "tls_cert is missing in models.m.settings"),
        ("admin_token: of-one-0123456", "admin_token: of-two-0123456", "is not that of routers.settings"),
    ],
)
def test_routers_and_workers_that_could_not_reach_each_other_are_refused(routers, model, missing):
    """They would wait for each other without end, and every one of them would be well."""
    with pytest.raises(SettingsError) as refused:
        parse_spec(f"routers: {{settings: {{{routers}}}}}\n" + one_model(f"{{model: demo, {model}}}"))
    assert missing in str(refused.value)


@pytest.mark.parametrize(
    ("routers", "model"),
    [
        ("admin_token: '@/token', api_keys: [/keys]", "admin_token: '@/token'"),
        ("admin_token: of-both-0123456", "admin_token: of-both-0123456"),
        ("admin_token: of-both-0123456", "admin_token: '@/token'"),
        ("admin_token: '@/here'", "admin_token: '@/there'"),
        ("tls_cert: /a, tls_key: /a", "tls_ca: /c"),
        ("tls_ca: system", "tls_cert: /a, tls_key: /a"),
    ],
)
def test_a_side_needs_no_more_than_the_other_asks_for(routers, model):
    parse_spec(f"routers: {{settings: {{{routers}}}}}\n" + one_model(f"{{model: demo, {model}}}"))


def test_every_fault_is_told_at_once():
    with pytest.raises(SettingsError) as refused:
        parse_spec(one_model("{model: demo, page_size: 3, port: 99999}"))
    assert len(str(refused.value).splitlines()) == 2


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"cannot read .*none\.yaml"):
        read_spec(tmp_path / "none.yaml")
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(SettingsError, match=r"picture\.yaml is not UTF-8 text"):
        read_spec(tmp_path / "picture.yaml")


@pytest.mark.parametrize("model", ["./Qwen3-0.6B", "Qwen3-0.6B", "models/x.gguf"])
def test_on_a_cluster_a_model_is_named_from_the_root(model):
    """It is read where a worker runs, and not where the command is: there it was never found, and tried for ever."""
    spec = parse_spec(one_model(f"{{model: {model}}}"))
    with pytest.raises(SettingsError, match=r"model in models\.m\.settings of f must be a path from the root"):
        check_for_ray(spec, "f")
    for known in ("demo", "/models/Qwen3-0.6B", "~/models/Qwen3-0.6B"):
        check_for_ray(parse_spec(one_model(f"{{model: {known}}}")), "f")


def test_the_environment_of_the_operator_does_not_judge_settings_of_the_nodes(monkeypatch):
    monkeypatch.setenv("RADIXFLEET_WORKER_PAGE_SIZE", "3")
    assert parse_spec(one_model()).worker_settings("m") == {"model": "demo", "served_model_name": "m"}


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ("{model: demo}", {"GPU": 1.0}),
        ("{model: demo, device: cpu}", {"worker_slot": 1.0}),
        ("{model: demo, runner: sim}", {"worker_slot": 1.0}),
    ],
)
def test_a_worker_needs_a_gpu_unless_it_computes_without(settings, needs):
    assert parse_spec(one_model(settings)).models["m"].needs == needs
    assert parse_spec(one_model(settings, resources="{x: 2}")).models["m"].needs == {"x": 2.0}


def test_routers_share_a_node_by_ports_of_their_own():
    spec = parse_spec("routers: {count: 2, settings: {port: 8000, metrics_port: 0, http_port: -1}}\n" + one_model())
    first, second = spec.router_settings(0), spec.router_settings(1)
    assert (first["port"], second["port"]) == (8000, 8010)
    assert (second["metrics_port"], second["http_port"]) == (0, -1), "any port, and none, stay what they are"
    assert spec.routers.resources == {HEAD: 0.001}


def test_the_revision_changes_with_what_a_member_is_made_of_and_not_with_how_many_there_are():
    before = parse_spec(one_model())
    more = parse_spec(one_model(workers="{min: 1, max: 9}", scaling="{up_after_s: 1}"))
    other = parse_spec(one_model("{model: demo, page_size: 32}"))
    assert before.revision("m") == more.revision("m") != other.revision("m")
    assert before.revision("router") == other.revision("router")
    assert before.revision("router") != parse_spec("routers: {settings: {port: 1}}\n" + one_model()).revision("router")


@pytest.mark.parametrize(
    ("routers", "said"),
    [
        ("{settings: {processes: 2}}", "processes in routers.settings of f.yaml is of no use on Ray"),
        ("{count: 3, settings: {port: 65520}}", "port of router-2 would be 65540 in f.yaml"),
        ("{count: 2, settings: {metrics_port: 7080}}", "metrics_port of router-0 and port of router-1: each router"),
    ],
)
def test_what_only_a_cluster_cannot_do_is_said_before_it_is_tried(routers, said):
    spec = parse_spec(f"routers: {routers}\n{one_model()}")
    with pytest.raises(SettingsError) as refused:
        check_for_ray(spec, "f.yaml")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "routers",
    [
        "{count: 3}",
        "{settings: {processes: 1, http_port: -1, metrics_port: 0}}",
        "{count: 2, settings: {metrics_port: 7080}, resources: {router: 1}}",
    ],
)
def test_routers_that_do_not_meet_are_let_be(routers):
    check_for_ray(parse_spec(f"routers: {routers}\n{one_model()}"), "f.yaml")


def test_an_anchor_and_a_merge_are_no_second_key():
    text = "models:\n  a: &a {workers: 1, settings: {model: demo}}\n  b:\n    <<: *a\n    workers: 2\n"
    spec = parse_spec(text)
    assert (spec.models["a"].workers.min, spec.models["b"].workers.min) == (1, 2)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("routers: {settings: {api_keys: [/keys]}}\n" + one_model(), "routers.settings"),
        (one_model("{model: demo, api_keys: [/keys]}"), "models.m.settings"),
    ],
)
def test_on_a_cluster_keys_need_a_token_in_the_file(text, part):
    """The file was taken, and every router or worker failed."""
    with pytest.raises(SettingsError, match=f"admin_token is missing in {part} of f.yaml, which has api_keys"):
        check_for_ray(parse_spec(text), "f.yaml")


def test_what_is_printed_of_a_spec_has_no_settings():
    """Tokens may stand there."""
    token = "of-both-0123456"
    settings = f"admin_token: {token}"
    spec = parse_spec(f"routers: {{settings: {{{settings}}}}}\n" + one_model(f"{{model: demo, {settings}}}"))
    assert token not in f"{spec!r} {spec}"


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("routers: {settings: [admin_token: TOKEN]}\n" + one_model(), "got a list"),
        ("routers: {settings: {api_keys: {x: TOKEN}}}\n" + one_model(), "got names with values"),
        ("models: {m: [{settings: {admin_token: TOKEN}}]}", "got a list"),
    ],
)
def test_a_complaint_does_not_tell_what_a_wrong_part_holds(text, got):
    """It goes to logs, and a token may stand there."""
    with pytest.raises(SettingsError) as refused:
        parse_spec(text.replace("TOKEN", "of-both-0123456"))
    assert got in str(refused.value)
    assert "of-both-0123456" not in str(refused.value)
