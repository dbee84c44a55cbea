"""The server and the load generator are told the same objectives."""

from dataclasses import asdict

from benchmarks.goodput_servers import WEIGHTS, mixture, objectives
from quire_engine.slo import parse_classes
from quire_load.report import parse_goodput


def test_server_and_client_judge_by_the_same_objectives() -> None:
    slo = objectives(rate=7.67, tpot_ms=103.6)
    words = mixture(slo)
    of_the_client = parse_goodput([word for word in words if "=" in word])
    of_the_server = parse_classes(slo)
    for name in WEIGHTS:
        targets = of_the_server[name]
        assert asdict(of_the_client[name]) == {"ttft": targets.ttft_ms, "tpot": targets.tpot_ms, "e2el": targets.e2e_ms}
    assert [word for word in words if word.partition(":")[0] in WEIGHTS] == ["chat:5", "code:3", "batch:2"]
