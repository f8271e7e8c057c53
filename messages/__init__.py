"""Wire types of PEARL: everything that passes between its processes.

One file per receiver. `envelope` says how a message becomes bytes, `subjects` where it travels, `ids` what
identifies things. Imports nothing else of PEARL's.

Glossary (one word, one meaning):

- *worker*: a stable slot in the role table bound to a fixed set of GPUs; an *incarnation* is one process in it.
- *zone*: where the GPUs come from. *role*: what the worker does. *activity*: whether it does it now.
- *epoch*: version of the role table. *role generation*: version of one row's role and activity.
- *budget*: the slots rollout may use. *target*: the role counts wanted. *plan*: the minimal change that gets there.
- *cut epoch* / *admit epoch*: the table writes that begin and end a plan's apply section.
- *edge*: whoever holds a request's state for its client: an agent, or the gateway.
- *attempt*: one worker's try at a request. *prefix*: reply tokens the edge already has.
- *policy version* v: the policy after v training steps. *batch* k trains version k into k + 1.
- *train step*: one such update. *turn*: one generation and the environment's answer. *trajectory*: all turns of a task.
- *group*: trajectories of one task, whose rewards are normalised together (GRPO).
"""

from messages import (
    agent,
    decision_engine,
    elastic_scheduler,
    envelope,
    executors,
    ids,
    monitor,
    node_agent,
    orchestrator,
    pipeline_scheduler,
    rollout_worker,
    router,
    runtime_tracker,
    subjects,
    toggle_manager,
    trainer,
)

__all__ = [
    "agent",
    "decision_engine",
    "elastic_scheduler",
    "envelope",
    "executors",
    "ids",
    "monitor",
    "node_agent",
    "orchestrator",
    "pipeline_scheduler",
    "rollout_worker",
    "router",
    "runtime_tracker",
    "subjects",
    "toggle_manager",
    "trainer",
]
