"""`pearl events available|reclaim`: tell PEARL by hand that GPUs came or go."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.envelope import encode
from messages.ids import NodeId
from messages.subjects import subject_of
from pearl_state.peers import wrong_capacity
from services.cli.progress import progress
from services.cli.runs import connect_running, job_of
from services.jobfile import ConfigError, JobFile


def run(arguments: argparse.Namespace) -> int:
    """Publishes one event; the elastic scheduler judges it too (a refused one is in `pearl tap 'dead.>'`)."""
    job = job_of(arguments)
    node = next((node for node in job.nodes if node.name == arguments.node), None)
    if node is None:
        known = ", ".join(node.name for node in job.nodes) or "none"
        raise ConfigError(f"--node {arguments.node!r} is not in the job file, which has {known}")
    try:
        gpus = tuple(int(part) for part in arguments.gpus.split(","))
    except ValueError as error:
        raise ConfigError(f"--gpus {arguments.gpus!r} is not a list of indices such as 0,1") from error
    message: GpuAvailable | GpuReclaimed
    if arguments.event == "available":
        message = GpuAvailable(node=NodeId(node.name), gpus=gpus, source="pearl events")
    else:
        if not math.isfinite(arguments.notice_s):
            raise ConfigError(f"--notice-s {arguments.notice_s}: give seconds")
        notice_ms = round(arguments.notice_s * 1000)
        message = GpuReclaimed(node=NodeId(node.name), gpus=gpus, notice_ms=notice_ms, source="pearl events")
    wrong = wrong_capacity(message, node.zone, node.gpus)
    if wrong:
        raise ConfigError(wrong)
    with progress("publishing"):
        seq = asyncio.run(_publish(job, message))
    subject = subject_of(job.job.name, message)
    print(json.dumps({"subject": subject, "seq": seq}) if arguments.json else f"published to {subject} as {seq}")
    return 0


async def _publish(job: JobFile, message: GpuAvailable | GpuReclaimed) -> int:
    bus = await connect_running(job, "cli")
    try:
        subject = subject_of(job.job.name, message)
        return await bus.publish_durable(subject, encode(message), msg_id=f"events:{os.getpid()}:{time.time_ns()}")
    finally:
        await bus.close()
