"""The house's floors, kept by reading the source: arrows only point down, and the ground floors run without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent / "hybridlab"

# From the ground up. A module or package may import its own floor (but never in a circle) and those below.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "schedule", "shapes", "report", "cuts", "exchange", "packing"),
    ("plan",),
    ("config", "models", "data"),
    ("mesh", "comm", "ledger", "buckets", "deferred", "gradients", "placement"),
    ("parallel",),
    ("optim", "engine", "assembly", "compiled", "checkpoint", "logical"),
    ("launch", "rehearse", "verify", "train"),
    ("show", "grade"),
    ("commands", "cli", "__main__"),
)
STDLIB_ONLY = FLOORS[0] + FLOORS[1]
STRANGERS = ("parallel",)  # packages whose members must not know each other
SPEAKERS = ("comm", "launch")  # where torch.distributed's collectives may be named (also files called comm_*.py)
LONGEST = 400

COLLECTIVES = frozenset(
    {
        *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
        *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
        *("broadcast", "broadcast_object_list", "gather", "gather_object", "scatter", "scatter_object_list", "reduce"),
        *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "batch_isend_irecv", "P2POp"),
        *("send", "isend", "send_object_list", "recv", "irecv", "recv_object_list"),
    }
)
# Other doors to the same collectives.
BACK_DOORS = ("torch.distributed._functional_collectives", "torch.distributed.nn", "torch.distributed.distributed_c10d")


@dataclass(frozen=True)
class Module:
    """A source file. ``name`` leaves out the house's own: "parallel.zero.stage1", "plan" for plan/__init__.py."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Import:
    line: int
    target: str  # dotted as written, made absolute: "torch.distributed.all_reduce", "hybridlab.plan.layout.Layout"


def read_house(root: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return modules


def imports_of(module: Module) -> Iterator[Import]:
    """Every import, wherever it stands: at the top, inside functions, for type checkers only, by a string."""
    here = ["hybridlab", *module.name.split(".")] if module.name else ["hybridlab"]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                up = node.level - 1 if module.is_package else node.level
                origin = ".".join([*here[: len(here) - up], *filter(None, [origin])])
            for alias in node.names:
                yield Import(node.lineno, f"{origin}.{alias.name}")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Import(node.lineno, node.args[0].value)


def arrows(modules: dict[str, Module], module: Module) -> Iterator[tuple[str, int]]:
    """The house's modules that one of them imports, each by its longest known name, with the line."""
    for found in imports_of(module):
        first, _, name = found.target.partition(".")
        if first != "hybridlab":
            continue
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name:
            yield name, found.line


# -- the rules: each yields one sentence per violation -----------------------------------------------------------------
def unplaced(modules: dict[str, Module]) -> Iterator[str]:
    """Every room stands on a floor, and the root imports none of them."""
    placed = {room for floor in FLOORS for room in floor}
    for room in sorted({module.room for module in modules.values()} - placed - {""}):
        yield f"{room}: stands on no floor; give it one in FLOORS"
    if "" in modules:
        for target, line in arrows(modules, modules[""]):
            yield f"__init__.py:{line} imports {target}; `import hybridlab` must stay light"


def upward(modules: dict[str, Module]) -> Iterator[str]:
    height = {room: level for level, floor in enumerate(FLOORS) for room in floor}
    for module in modules.values():
        for target, line in arrows(modules, module):
            here, there = height.get(module.room), height.get(target.partition(".")[0])
            if here is not None and there is not None and there > here:
                yield f"{module.name}:{line} (floor {here}) imports {target} (floor {there}): arrows only point down"


def strangers(modules: dict[str, Module]) -> Iterator[str]:
    """Members of one package that must not import each other; a member's own sub-modules may."""
    for module in modules.values():
        room, _, inner = module.name.partition(".")
        if room not in STRANGERS or not inner:
            continue
        for target, line in arrows(modules, module):
            their_room, _, their_inner = target.partition(".")
            if their_room == room and their_inner and their_inner.split(".")[0] != inner.split(".")[0]:
                yield f"{module.name}:{line} imports its sibling {target}"


def circles(modules: dict[str, Module]) -> Iterator[str]:
    """Circles of imports, those inside functions included: they hide a circle, they do not break it."""
    graph = {name: sorted({target for target, _ in arrows(modules, m)} - {name}) for name, m in modules.items()}
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> Iterator[str]:
        if name in path:
            yield "circle: " + " -> ".join([*path[path.index(name) :], name])
        elif name not in done:
            for target in graph[name]:
                yield from walk(target, [*path, name])
            done.add(name)

    for name in graph:
        yield from walk(name, [])


def not_stdlib(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        if module.room in STDLIB_ONLY:
            for found in imports_of(module):
                package = found.target.partition(".")[0]
                if package != "hybridlab" and package not in sys.stdlib_module_names:
                    yield f"{module.name}:{found.line} imports {package}; this floor runs on the standard library alone"


def loose_talk(modules: dict[str, Module]) -> Iterator[str]:
    """Collectives named outside `hybridlab.comm`: no ledger would see them, no guard would check them."""
    for module in modules.values():
        if module.room in SPEAKERS or module.name.startswith("comm_"):
            continue
        names = {"torch": "torch"}  # what local names stand for
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                names.update({alias.asname: alias.name for alias in node.names if alias.asname})
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        for found in imports_of(module):
            origin, _, name = found.target.rpartition(".")
            if found.target.startswith(BACK_DOORS) or (origin == "torch.distributed" and name in COLLECTIVES):
                yield f"{module.name}:{found.line} imports {found.target}: collectives belong to hybridlab.comm"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                owner, name = node.value, node.attr
            elif is_getattr_of_a_constant(node):
                owner, name = node.args[0], node.args[1].value
            else:
                continue
            if name in COLLECTIVES and full_name(owner, names) == "torch.distributed":
                yield f"{module.name}:{node.lineno} uses torch.distributed.{name}: collectives belong to hybridlab.comm"


def is_getattr_of_a_constant(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and len(node.args) >= 2
        and isinstance(node.args[1], ast.Constant)
    )


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """``dist`` or ``torch.distributed`` as the dotted name it stands for, "" for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, names)}.{node.attr}"
    return ""


def bare_excepts(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                yield f"{module.name}:{node.lineno} has a bare `except:`, which also swallows Ctrl-C"


def undocumented(modules: dict[str, Module]) -> Iterator[str]:
    """Public modules, classes, functions and methods. A method of one statement explains itself, and so do the names
    that torch gives a meaning to."""
    for module in modules.values():
        if module.tree.body and not ast.get_docstring(module.tree):
            yield f"{module.name or '__init__'}: the module has no docstring"
        stack: list[ast.Module | ast.ClassDef] = [module.tree]
        while stack:
            owner = stack.pop()
            for node in owner.body:
                if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if node.name.startswith("_"):
                    continue
                if not ast.get_docstring(node) and not explains_itself(node, inside=owner):
                    yield f"{module.name}:{node.lineno} {node.name} has no docstring"
                if isinstance(node, ast.ClassDef):
                    stack.append(node)


def explains_itself(node: ast.AST, inside: ast.AST) -> bool:
    if isinstance(node, ast.ClassDef):
        return False
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if "overload" in decorators:
        return True
    return isinstance(inside, ast.ClassDef) and (len(node.body) == 1 or node.name in ("forward", "backward"))


def too_long(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        lines = len(module.path.read_text(encoding="utf-8").splitlines())
        if lines > LONGEST:
            yield f"{module.path.name}: {lines} lines, more than {LONGEST}: not to be read in one sitting"


RULES = [unplaced, upward, strangers, circles, not_stdlib, loose_talk, bare_excepts, undocumented, too_long]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house(rule: object) -> None:
    violations = list(rule(read_house(HOUSE)))  # type: ignore[operator]
    assert not violations, "\n" + "\n".join(violations)


def loaded_by(imports: str) -> set[str]:
    """Top-level packages a fresh interpreter holds after the imports."""
    code = f"{imports}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HOUSE.parent, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_the_ground_floors_load_nothing_heavy() -> None:
    """What a fresh interpreter really loads: a dependency of a dependency shows here and not in the source."""
    rooms = [module.name for module in read_house(HOUSE).values() if module.room in STDLIB_ONLY]
    loaded = loaded_by("\n".join(f"import hybridlab.{name}" for name in rooms))
    assert not loaded & {"torch", "numpy", "pydantic", "rich", "typer"}


def test_the_config_loads_no_torch() -> None:
    rooms = [module.name for module in read_house(HOUSE).values() if module.room == "config"]
    assert "torch" not in loaded_by("\n".join(f"import hybridlab.{name}" for name in rooms))


# -- the rules themselves: each must see what it is there for, and nothing else ----------------------------------------
GOOD = {
    "__init__.py": '"""Root."""',
    "errors.py": '"""E."""\nimport json\n',
    "plan/__init__.py": '"""P."""\nfrom .layout import Layout\n',
    "plan/layout.py": '"""L."""\nfrom hybridlab.errors import Bad\n\n\nclass Layout:\n    """A grid."""\n',
    "comm.py": '"""C."""\nimport torch.distributed as dist\ndist.all_reduce(1)\n',
    "mesh.py": '"""M."""\nimport torch.distributed as dist\ndist.get_rank()\nclient.send(dist)\n',
    "parallel/__init__.py": "",
    "parallel/zero/stage1.py": '"""S."""\nfrom hybridlab import comm\n',
    "parallel/zero/stage2.py": '"""S."""\nfrom hybridlab.parallel.zero import stage1\n',
    "parallel/data.py": '"""D."""\n\n\ndef _private():\n    pass\n',
    "engine.py": '"""E."""\nfrom hybridlab.parallel import data\nfrom hybridlab.parallel.zero import stage2\n',
}
PLANTED = {
    "unplaced": ("cellar.py", '"""C."""', "cellar: stands on no floor"),
    "unplaced root": ("__init__.py", '"""R."""\nimport hybridlab.plan\n', "__init__.py:2 imports plan"),
    "upward": ("plan/time.py", '"""T."""\nfrom hybridlab.mesh import Mesh\n', "plan.time:2 (floor 1) imports mesh"),
    "upward lazy": ("comm.py", '"""C."""\ndef _f():\n    import hybridlab.engine\n', "comm:3 (floor 3) imports engine"),
    "upward relative": ("plan/time.py", '"""T."""\nfrom ..comm import x\n', "plan.time:2 (floor 1) imports comm"),
    "upward from": ("plan/time.py", '"""T."""\nfrom hybridlab import comm\n', "plan.time:2 (floor 1) imports comm"),
    "upward string": (
        "plan/time.py",
        '"""T."""\nimport importlib\nimportlib.import_module("hybridlab.engine")\n',
        "plan.time:3 (floor 1) imports engine",
    ),
    "strangers": (
        "parallel/data.py",
        '"""D."""\nfrom hybridlab.parallel.zero.stage1 import x\n',
        "parallel.data:2 imports its sibling parallel.zero.stage1",
    ),
    "strangers relative": (
        "parallel/zero/stage1.py",
        '"""S."""\nfrom ..data import x\n',
        "parallel.zero.stage1:2 imports its sibling parallel.data",
    ),
    "circles": (
        "parallel/zero/stage1.py",
        '"""S."""\ndef _f():\n    from hybridlab.parallel.zero import stage2\n',
        "parallel.zero.stage2 -> parallel.zero.stage1",
    ),
    "circles package": (
        "plan/layout.py",
        '"""L."""\nfrom hybridlab.plan import Layout\n',
        "circle: plan -> plan.layout",
    ),
    "not_stdlib": ("plan/time.py", '"""T."""\ndef _f():\n    import numpy.linalg\n', "plan.time:3 imports numpy"),
    "loose_talk": (
        "mesh.py",
        '"""M."""\nfrom torch import distributed as d\nd.barrier()\n',
        "mesh:3 uses torch.distributed.barrier",
    ),
    "loose_talk chain": (
        "engine.py",
        '"""E."""\nimport torch\nf = torch.distributed.all_reduce\n',
        "engine:3 uses torch.distributed.all_reduce",
    ),
    "loose_talk plain": (
        "engine.py",
        '"""E."""\nimport torch.distributed\ntorch.distributed.send(1)\n',
        "engine:3 uses torch.distributed.send",
    ),
    "loose_talk from": (
        "engine.py",
        '"""E."""\nfrom torch.distributed import isend\n',
        "engine:2 imports torch.distributed.isend",
    ),
    "loose_talk getattr": (
        "engine.py",
        '"""E."""\nimport torch.distributed as dist\ngetattr(dist, "all_gather_single")\n',
        "engine:3 uses torch.distributed.all_gather_single",
    ),
    "loose_talk functional": (
        "engine.py",
        '"""E."""\nimport torch.distributed._functional_collectives as funcol\n',
        "engine:2 imports torch.distributed._functional_collectives",
    ),
    "bare_excepts": ("engine.py", '"""E."""\ntry:\n    x = 1\nexcept:\n    x = 2\n', "engine:4 has a bare"),
    "undocumented module": ("engine.py", "x = 1\n", "engine: the module has no docstring"),
    "undocumented class": ("engine.py", '"""E."""\nclass Engine:\n    pass\n', "engine:2 Engine has no docstring"),
    "undocumented method": (
        "engine.py",
        '"""E."""\nclass E:\n    """T."""\n    def s(self): ...\n    def t(self):\n        a()\n        b()\n',
        "engine:5 t has no docstring",
    ),
    "undocumented function": ("engine.py", '"""E."""\ndef train(): ...\n', "engine:2 train has no docstring"),
    "too_long": ("engine.py", '"""E."""\n' + "x = 1\n" * LONGEST, "engine.py: 401 lines"),
}


def build(root: Path, files: dict[str, str]) -> dict[str, Module]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_house(root)


def test_a_sound_house_breaks_no_rule(tmp_path: Path) -> None:
    modules = build(tmp_path, GOOD)
    assert [violation for rule in RULES for violation in rule(modules)] == []


@pytest.mark.parametrize("case", PLANTED)
def test_each_rule_sees_a_planted_violation(case: str, tmp_path: Path) -> None:
    name, text, told = PLANTED[case]
    rule = next(rule for rule in RULES if rule.__name__ == case.partition(" ")[0])
    violations = list(rule(build(tmp_path, {**GOOD, name: text})))
    assert len(violations) == 1
    assert told in violations[0]


def test_a_loaded_package_is_seen() -> None:
    assert "decimal" in loaded_by("import decimal")
    assert "decimal" not in loaded_by("import hybridlab")
