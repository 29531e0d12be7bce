#!/usr/bin/env python3
"""check_figures.py FILE: every figure of the list is there once, as a well-formed line."""
import json
import sys

FIGURES = {
    "restart.kill_to_step_1mb", "restart.kill_to_step_64mb", "restart.kill_to_step_1mb_template",
    "restart.kill_to_step_64mb_template", "restart.steps_lost", "snapshot.copy",
    "persist.rate", "persist.cpu", "checkpoint.plan", "checkpoint.tiny", "checkpoint.stall_lazy", "checkpoint.snapshot_eager",
    "checkpoint.persist", "checkpoint.persist_cpu", "checkpoint.restore_buffer", "checkpoint.restore_disk", "checkpoint.rss_growth",
    "checkpoint.step_slowdown", "remote.upload", "remote.fetch", "meter.mark", "flight.record",
    "launch.start_2", "restart.term_ignored", "agent.kill_to_no_orphan", "allreduce.2_nodes_1mb", "allreduce.4_nodes_1mb", "allreduce.2_nodes_64mb", "allreduce.4_nodes_64mb",
}
OF_GRPC = {"join.128", "join.1024", "restart.node_lost", "restart.node_lost_from_kill", "coordinator.steps_lost",
           "coordinator.outage_pace"}  # where it is built
MAY_BE_ZERO = {"restart.steps_lost", "coordinator.steps_lost"}
DIFFERENCES = {"checkpoint.rss_growth", "checkpoint.step_slowdown"}  # zero and less too


def problems(lines):
    seen = []
    for line in lines:
        figure = json.loads(line)
        name = figure["name"]
        seen.append(name)
        least, value = figure["min"], figure["value"]
        is_plausible = name in DIFFERENCES or (least >= 0 and (value > 0 or name in MAY_BE_ZERO))
        if not least <= value <= figure["max"] or not is_plausible:
            yield f"{name}: value {value}, min {least}, max {figure['max']}"
        if figure["n"] < 1 or not figure["unit"] or not isinstance(figure["ok"], bool):
            yield f"{name}: n, unit or ok: {line.strip()}"
        for reference in ("limit", "peer"):
            found = figure[reference]
            if found is not None and not (found["name"] and found["value"] > 0):
                yield f"{name}: {reference} {found}"
    if sorted(seen) not in (sorted(FIGURES), sorted(FIGURES | OF_GRPC)):
        yield f"figures: found {sorted(seen)}, wanted {sorted(FIGURES)}"


with open(sys.argv[1], encoding="utf-8") as file:
    found = list(problems(file))
print("\n".join(found) if found else "all figures are well-formed")
sys.exit(1 if found else 0)
