"""The structure that docs promise, as tests: who imports whom, what pure files may touch, what must be documented."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("services", "messages", "pearl_state")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
CORES = sorted(path for path in FILES if path.name == "core.py" or path.name.startswith("core_"))
PURE = sorted(
    {
        *(path for path in CORES if path.parent.name not in ("runtime",)),
        *(
            ROOT / "pearl_state" / name
            for name in (
                "model.py",
                "plan.py",
                "plan_files.py",
                "invariants.py",
                "orders.py",
                "parts.py",
                "peers.py",
                "progress.py",
            )
        ),
        ROOT / "services/decision_engine/makespan.py",
        ROOT / "services/pipeline_scheduler/batches.py",
        ROOT / "services/preemption_feed/schedule.py",
        *(ROOT / "services/timing" / name for name in ("hardware.py", "prefix_cache.py", "engine.py")),
        ROOT / "services/rollout_worker/engines/kv_protocol.py",
        *(path for path in (ROOT / "messages").glob("*.py")),
    }
)
IMPURE_MODULES = {"asyncio", "nats", "torch", "time", "random", "logging", "os", "subprocess", "socket", "threading"}
LIBRARIES = {"runtime", "models", "environments", "timing", "edge"}
"""Folders of services/ that any service may import: they are libraries, not actors."""
SHARED_FILES = {"csvtable", "jobfile", "connect", "durable", "snapshot", "profile", "replica"}
READERS = {"bench", "cli", "emulated_fleet", "monitor", "supervisor", "simulator", "checker"}
"""May import other services: they put the system together, or show it."""


@functools.cache
def imports(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_go_services_then_pearl_state_then_messages() -> None:
    forbidden = {"messages": ("services", "pearl_state"), "pearl_state": ("services",), "services": ()}
    assert not [
        f"{relative(path)} imports {name}"
        for path in FILES
        for name in imports(path)
        if name.split(".")[0] in forbidden[path.relative_to(ROOT).parts[0]]
    ]


def test_a_service_imports_no_other_service() -> None:
    found = []
    for path in FILES:
        package, *parts = path.relative_to(ROOT).parts
        if package != "services" or len(parts) == 1 or parts[0] in READERS:
            continue
        others = {name.split(".")[1] for name in imports(path) if name.startswith("services.")}
        found += [f"{relative(path)} imports {name}" for name in others - {parts[0], *LIBRARIES, *SHARED_FILES}]
    assert not found


def test_pure_files_touch_nothing_impure() -> None:
    assert not [
        f"{relative(path)} imports {name}"
        for path in PURE
        for name in imports(path)
        if name.split(".")[0] in IMPURE_MODULES
    ]


def test_cores_import_without_torch_nats_or_asyncio() -> None:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PURE if path.name != "__init__.py"]
    code = (
        f"import sys, importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
        "bad = {'torch', 'nats', 'asyncio'} & set(sys.modules)\nassert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)


def test_only_the_runtime_imports_nats() -> None:
    users = [relative(path) for path in FILES if "nats" in {name.split(".")[0] for name in imports(path)}]
    assert users == ["services/runtime/bus_nats_connection.py"]


def test_only_the_runtime_starts_pools() -> None:
    """`services.runtime.pool` ends its workers with their parent; any other pool would leave orphans."""
    names = {"concurrent.futures.ProcessPoolExecutor", "multiprocessing.Pool", "multiprocessing.pool"}
    users = [relative(path) for path in FILES if imports(path) & names]
    assert users == ["services/runtime/pool.py"]


TALKS = re.compile(r"services/(cli/\w+|bench/gateway(_peer)?|harness/(mini_swe_agent|verifiers_episode))\.py")
"""Commands, and the programs that others start and read: they print. Services log."""
ANYTHING = {"Exception", "BaseException"}
"""(A group names what a task group raised; whoever catches one takes it apart.)"""


def catches_anything(source: str) -> list[str]:
    """Where the source catches, or suppresses, whatever may be raised: alone, in a tuple, by a qualified name."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            caught = [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
            caught = list(node.args)
        else:
            continue
        for each in caught:
            names = each.elts if isinstance(each, ast.Tuple) else [each]
            said = ["everything" if name is None else ast.unparse(name).split(".")[-1] for name in names]
            found += [f"line {node.lineno} catches {name}" for name in said if name in {"everything", *ANYTHING}]
    return found


def prints(source: str) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [f"line {call.lineno} prints" for call in calls if ast.unparse(call.func) in ("print", "builtins.print")]


def test_no_bare_except_and_no_print_in_services() -> None:
    found = []
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        wrong = catches_anything(source) if "runtime" not in path.parts else []
        wrong += prints(source) if not TALKS.fullmatch(relative(path)) else []
        found += [f"{relative(path)}: {each}" for each in wrong]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "try: f()\nexcept: pass",
        "try: f()\nexcept Exception: pass",
        "try: f()\nexcept (ValueError, Exception) as error: pass",
        "try: f()\nexcept builtins.BaseException: pass",
        "try: f()\nexcept* Exception: pass",
        "with contextlib.suppress(OSError, Exception): f()",
    ],
)
def test_the_search_for_catching_anything_finds_it(line: str) -> None:
    assert len(catches_anything(line)) == 1


def test_the_searches_let_the_ordinary_pass_and_find_a_print() -> None:
    ordinary = "try: f()\nexcept (OSError, ValueError): pass\nwith suppress(TimeoutError): fingerprint()\n"
    assert not catches_anything(ordinary) and not prints(ordinary)
    assert prints("def f():\n    print('x', file=sys.stderr)") == ["line 2 prints"]


def undocumented(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and not ("Section" in node.name or node.name in ("JobFile", "main"))
    ]
    nodes = [tree, *public] if tree.body else []
    return [getattr(node, "name", "the module") for node in nodes if not ast.get_docstring(node)]


def test_every_module_and_public_class_has_a_docstring() -> None:
    assert not [f"{relative(path)}: {name} has no docstring" for path in FILES for name in undocumented(path)]


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_the_repository_names_no_machine() -> None:
    pattern = re.compile(r"/wor[k]/[a-z.]|/far[m]/|/opt/wheel[s]|file:/[/]")
    found = []
    for path in tracked():
        if path.suffix in (".png", ".svg", ".gif", ".lock", ".safetensors"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{relative(path)}: {match.group()}" for match in pattern.finditer(text)]
    assert not found


def test_generated_docs_are_current() -> None:
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_is_reached() -> None:
    """No dead files: each module is imported somewhere, or is an entry that the command loads by name."""
    imported: set[str] = set()
    for path in [
        *FILES,
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "docs").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
    ]:
        imported |= imports(path)
    entries = re.compile(
        r"services/\w+/(service|__main__|__init__)\.py|services/cli/\w+\.py|services/trainer/rank_main\.py|.*/shim/sitecustomize\.py|\w+/__init__\.py"
    )
    dead = []
    for path in FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if name not in imported and not entries.fullmatch(relative(path)) and path.name != "__init__.py":
            dead.append(name)
    assert not [name for name in dead if not name.startswith("services.environments.")]
