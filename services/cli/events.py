"""`pearl events available|reclaim`: tell PEARL by hand that GPUs came or go."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time

from messages.elastic_scheduler import GpuAvailable, GpuReclaimed
from messages.envelope import encode
from messages.ids import NodeId
from messages.subjects import TOKEN, subject_of
from services.cli.runs import job_of
from services.connect import connect
from services.jobfile import ConfigError, JobFile


def run(arguments: argparse.Namespace) -> int:
    """Publishes one event; the elastic scheduler judges it (a refused one is in `pearl tap 'dead.>'`)."""
    job = job_of(arguments)
    if not TOKEN.fullmatch(arguments.node):
        raise ConfigError(f"--node {arguments.node!r} is not a node name")
    try:
        gpus = tuple(int(part) for part in arguments.gpus.split(","))
    except ValueError as error:
        raise ConfigError(f"--gpus {arguments.gpus!r} is not a list of indices such as 0,1") from error
    node = NodeId(arguments.node)
    message: GpuAvailable | GpuReclaimed
    if arguments.event == "available":
        message = GpuAvailable(node=node, gpus=gpus, source="pearl events")
    else:
        notice_ms = round(arguments.notice_s * 1000)
        message = GpuReclaimed(node=node, gpus=gpus, notice_ms=notice_ms, source="pearl events")
    seq = asyncio.run(_publish(job, message))
    subject = subject_of(job.job.name, message)
    print(json.dumps({"subject": subject, "seq": seq}) if arguments.json else f"published to {subject} as {seq}")
    return 0


async def _publish(job: JobFile, message: GpuAvailable | GpuReclaimed) -> int:
    bus = await connect(job, "cli")
    try:
        subject = subject_of(job.job.name, message)
        return await bus.publish_durable(subject, encode(message), msg_id=f"events:{os.getpid()}:{time.time_ns()}")
    finally:
        await bus.close()
