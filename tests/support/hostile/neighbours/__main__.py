"""Measure gaps: `python -m tests.support.hostile.neighbours ENGINE [--random N] [--json FILE]`.

Prints a row for each attack, and the longest gap of each kind, beside that with nobody attacking.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.hostile.neighbours.attacks import Doors, known_attacks, random_attack
from tests.support.hostile.neighbours.measure import Outcome, attacked, idle
from tests.support.hostile.neighbours.streams import Neighbours
from tests.support.serving.gateway_process import run_gateway


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.support.hostile.neighbours", description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--random", type=int, default=220)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--no-known", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    attacks = [*([] if args.no_known else known_attacks()), *map(random_attack, range(args.first, args.random))]
    rows: list[dict] = []
    worst: dict[str, Outcome] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        TritonServer(args.engine, ServerOptions(kv_cache_gib=0.25)) as server,
        run_gateway(server, Path(folder)) as gateway,
        Neighbours(server.grpc_url, gateway.url) as neighbours,
    ):
        doors = Doors(server.grpc_url, gateway.url)
        first = server.state
        assert first is not None and first.engine_pid is not None
        outcomes = [idle(neighbours, 10.0)]
        for attack in attacks:
            outcomes.append(attacked(neighbours, attack, doors))
            print(json.dumps(outcomes[-1].to_json()), flush=True)
        outcomes.append(idle(neighbours, 10.0))
        last = server.state
        assert last is not None and last.engine_pid == first.engine_pid, "the engine process was replaced"
        assert not neighbours.errors, neighbours.errors[:3]
        memory = {"engine": rss_mib(first.engine_pid), "gateway": rss_mib(gateway.pid)}
    for outcome in outcomes:
        rows.append(outcome.to_json())
        if outcome.kind not in worst or outcome.gap_s > worst[outcome.kind].gap_s:
            worst[outcome.kind] = outcome
    for kind, outcome in worst.items():
        print(f"{kind:8s} longest gap {outcome.gap_s * 1000:7.0f} ms ({outcome.name}, {outcome.door})")
    print("resident MiB at the end:", {name: round(value) for name, value in memory.items()})
    if args.json:
        args.json.write_text(json.dumps({"memory_mib": memory, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
