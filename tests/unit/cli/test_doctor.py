"""`quire doctor` finds what is missing and says so to people and programs."""

import json

import pytest
from quire_cli import doctor
from quire_cli.doctor import Check
from quire_cli.main import run


def test_json_holds_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in report["checks"]]
    assert {
        "python",
        "cpu",
        "kernels",
        "cores",
        "memory",
        "gpu",
        "tritonserver",
        "ports",
        "/dev/shm",
        "leftovers",
    } <= set(names)
    assert all(check["mend"] for check in report["checks"] if check["status"] != "OK")
    assert code == (0 if report["fit"] else 1)


def test_what_serve_needs_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("a", "OK", "fine"), Check("b", "WARN", "so so", "mend it")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(checks))
    assert run(["doctor"]) == 0
    checks.append(Check("c", "FAIL", "gone", "bring it back"))
    assert run(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["FAIL", "c", "gone;", "bring", "it", "back"]


def test_lines_have_a_status_first(capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor"])
    assert all(line.split()[0] in ("OK", "WARN", "FAIL") for line in capsys.readouterr().out.splitlines())


def test_says_which_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_kernels import cpu

    def check(variable: str) -> Check:
        monkeypatch.setenv(cpu.KERNELS_VARIABLE, variable)
        cpu.status.cache_clear()
        return doctor._kernels()

    try:
        assert check("torch").status == "WARN"
        assert "plain torch, which is slow" in check("torch").detail
        wrong = check("sse2")
        assert (wrong.status, wrong.mend) == ("FAIL", "unset QUIRE_CPU_KERNELS")
        assert "known are avx512_bf16" in wrong.detail
    finally:
        monkeypatch.undo()
        cpu.status.cache_clear()
