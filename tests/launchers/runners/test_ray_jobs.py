import json

from autotune.launchers.runners.cluster.jobs import job_environment


def runtime_of(environment: dict[str, str]) -> dict[str, object]:
    result: dict[str, object] = json.loads(environment["RAY_JOB_CONFIG_JSON_ENV_VAR"])["runtime_env"]
    return result


def test_workers_of_a_framework_take_its_interpreter() -> None:
    assert "py_executable" not in runtime_of(job_environment("r/1", inherited=None))
    own = job_environment("r/1", inherited=None, python="/opt/verl/bin/python")
    assert runtime_of(own)["py_executable"] == "/opt/verl/bin/python"
    inherited = json.dumps({"runtime_env": {"py_executable": "uv run", "env_vars": {"A": "1"}}})
    kept = runtime_of(job_environment("r/1", inherited=inherited, python="/opt/verl/bin/python"))
    assert kept["py_executable"] == "uv run"
    assert kept["env_vars"] == {"A": "1", "AUTOTUNE_ATTEMPT": "r/1"}
