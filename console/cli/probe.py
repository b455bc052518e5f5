"""``glowplug probe``"""

from __future__ import annotations

from collections.abc import Iterator

import click

from console.clean import clean
from console.cli.common import Context, emit, json_option, run_async, say
from console.cli.nodes import ask, exit_code
from console.fleet import Fleet
from console.format import duration_text, percent_text, size_text
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import Gpu, Probe


@click.command("probe")
@click.argument("node", nargs=-1, required=True)
@json_option
@click.pass_obj
def command(context: Context, node: tuple[str, ...], as_json: bool) -> int:
    """Ask each NODE what it is: GPUs, driver, memory. Touches no GPU.

    Exit codes: 0 all answered, 3 a node out of reach.
    """
    config = context.load_config()
    names = [one.name for one in config.select(node)]
    context.start_log()
    answers = run_async(ask(context, config, names, _probe))
    for answer in answers:
        if answer.error is not None:
            say(str(answer.error))
        elif not as_json and answer.value is not None:
            for line in _lines(answer.node, answer.value):
                click.echo(clean(line, 1000))
    if as_json:
        emit(
            {
                "nodes": [
                    {
                        "node": answer.node,
                        "probe": encode(answer.value),
                        "error": answer.problem,
                    }
                    for answer in answers
                ]
            }
        )
    return exit_code(answers)


async def _probe(fleet: Fleet, node: str) -> Probe:
    try:
        return await fleet.probe(node)
    finally:
        for line in fleet.said(node):
            say(clean(line))


def _lines(node: str, probe: Probe) -> Iterator[str]:
    memory = f"{size_text(probe.memory_available_bytes)} of {size_text(probe.memory_total_bytes)} free"
    yield f"{node}  {probe.hostname}  {probe.cpu_count} CPUs  {memory}  Linux {probe.kernel}"
    if probe.gpus:
        yield f"  driver {probe.driver_version or '?'}  CUDA {probe.cuda_version or '?'}"
    else:
        yield f"  no GPU (sampler: {probe.sampler})"
    for gpu in probe.gpus:
        yield f"  {_gpu_line(gpu)}"
    for finding in probe.findings:
        yield f"  {finding.severity}: {finding.text}"
    yield f"  probed in {duration_text(probe.duration_ns)}"


def _gpu_line(gpu: Gpu) -> str:
    parts = [f"GPU {gpu.index}  {gpu.name}"]
    if gpu.memory_total_bytes:
        parts.append(f"{size_text(gpu.memory_used_bytes or 0)} of {size_text(gpu.memory_total_bytes)} used")
        parts.append(percent_text(gpu.memory_used_bytes or 0, gpu.memory_total_bytes))
    if gpu.utilisation is not None:
        parts.append(f"busy {gpu.utilisation} %")
    if gpu.temperature_c is not None:
        parts.append(f"{gpu.temperature_c} °C")
    return "  ".join([*parts, gpu.uuid])
