"""The ledger with one control left out: a second copy of kvcore, made from the same sources, for measurement only.

Owns the rewriting. A variant is a package of its own in this process: every kvcore module and `bench_load` are read, the
statements of one control are taken out of their syntax trees, and the rest is compiled as it stands; dead arithmetic falls to
the compiler. Invariant: production code has no switch for any of this, and what is left out decides no block, table or row:
every variant allocates the same blocks in the same order (its test).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

CONTROLS = ("generations", "digests", "receipts")
_FOLDER = Path(__file__).resolve().parent
_SOURCES = {path.stem: path for path in (_FOLDER.parent / "kvcore").glob("*.py")}
_SOURCES["bench_load"] = _FOLDER / "bench_load.py"
_FACTS = {"admitted", "fresh", "scrub", "copies", "facts", "shared_parts", "fresh_parts", "scrub_parts"}
_FACTS |= {"first_scrub", "other_scrub"}
_BARE_ANSWER = "return __import__('types').SimpleNamespace(**fields) if fields else None"
_KEPT_FIELDS = {"request", "children"}


@cache
def variant(*left_out: str) -> ModuleType:
    """`bench_load` over a kvcore without these controls; without any, the same sources loaded the same way."""
    name = "_".join(["copyhold_variant", *left_out])
    sys.meta_path.append(_Finder(name, frozenset(left_out)))
    return import_module(f"{name}.bench_load")


def rewritten(module: str, left_out: frozenset[str]) -> ast.Module:
    """The syntax tree of one module of a variant."""
    tree = ast.parse(_SOURCES[module].read_text("utf-8"))
    for kind, rules in (("imports", _Imports), ("generations", _NoGenerations), ("digests", _NoDigests)):
        if kind == "imports" or kind in left_out:
            tree = rules().visit(tree)
    if "receipts" in left_out:
        tree = _NoReceipts().visit(tree)
    return ast.fix_missing_locations(tree)


class _Finder(MetaPathFinder, Loader):
    """Loads the modules of one variant."""

    def __init__(self, package: str, left_out: frozenset[str]) -> None:
        self._package = package
        self._left_out = left_out

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package != self._package or (module and module not in _SOURCES):
            return None
        return ModuleSpec(fullname, self, is_package=not module)

    def exec_module(self, module: ModuleType) -> None:
        _, _, stem = module.__name__.partition(".")
        if stem:
            tree = rewritten(stem, self._left_out)
            exec(compile(tree, f"<{self._package}>/{stem}.py", "exec"), vars(module))


class _Imports(ast.NodeTransformer):
    """Modules of the variant import each other, and their loops are not kept on disk."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        folder = "copyhold.kvcore."
        if node.module and node.module.startswith(folder):
            return ast.ImportFrom(node.module[len(folder) :], node.names, 1)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        return ast.keyword("cache", ast.Constant(False)) if node.arg == "cache" else node


class _NoGenerations(ast.NodeTransformer):
    """No generation is written, compared or handed out: of blocks, slots, namespaces."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        return ast.Pass() if _names(node) & {"GENERATION", "SLOT_GENERATION"} else node

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        if isinstance(node.targets[0], ast.Subscript) and "SLOT_GENERATION" in _names(node.targets[0]):
            return ast.Pass()
        if isinstance(node.value, ast.Subscript) and "GENERATION" in _names(node.value):
            node.value = ast.Constant(0)
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if not _names(node) & {"SLOT_GENERATION", "generation"}:
            return node
        return ast.Constant(isinstance(node.ops[0], ast.Eq))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return ast.Constant(0) if _names(node) >= {"generation", "array"} else node

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        pairs = [
            (key, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if not (isinstance(key, ast.Attribute) and key.attr == "SLOT_GENERATION")
        ]
        return ast.Dict([key for key, _ in pairs], [value for _, value in pairs])


class _NoDigests(ast.NodeTransformer):
    """No sum is kept: neither of cells nor of tokens; receipts name two constants."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        into = node.target.value if isinstance(node.target, ast.Subscript) else None
        of_cells = isinstance(into, ast.Name) and into.id == "sums"
        return ast.Pass() if of_cells or "weights" in _names(node.value) else node

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        into = node.targets[0]
        one_cell = isinstance(into, ast.Subscript) and isinstance(into.slice, ast.Tuple)
        return ast.Pass() if one_cell and "TOKEN_PRINT" in _names(into) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        if node.name == "digests":
            empty = ast.Constant(bytes(16))
            node.body = [ast.Return(ast.Tuple([empty, empty], ast.Load()))]
            return node
        return self.generic_visit(node)  # type: ignore[return-value]


class _NoReceipts(ast.NodeTransformer):
    """Commands answer with new request handles alone; nothing that only a receipt says is collected."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        if node.name == "_receipt":
            node.body[-1:] = ast.parse(_BARE_ANSWER).body
        elif node.name.startswith("commit_"):
            node.body = _without_facts(node.body)
        elif node.name == "finish_rows":
            return _NoSealed().visit(node)
        return node


class _NoSealed(ast.NodeTransformer):
    """The one array that a loop fills for receipts only."""

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        return ast.Pass() if "sealed" in _names(node.targets[0]) else node


def _without_facts(body: list[ast.stmt]) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.For):
            node.body = _without_facts(node.body)
            if not node.body or _names(node.iter) & _FACTS:
                continue
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
            node.value = _kept_fields(node.value)
        elif _collects(node):
            kept += _effect(node)
            continue
        kept.append(node)
    return kept


def _kept_fields(node: ast.Dict) -> ast.Dict:
    pairs = [
        (key, value)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value in _KEPT_FIELDS
    ]
    return ast.Dict([key for key, _ in pairs], [value for _, value in pairs])


def _collects(node: ast.stmt) -> bool:
    """Whether a statement of a commit only gathers what its receipt will say."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        return isinstance(called, ast.Attribute) and called.attr == "append" and bool(_names(called) & _FACTS)
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        return isinstance(node.target, ast.Name) and node.target.id in _FACTS
    if not isinstance(node, ast.Assign) or not _names(node.targets[0]) <= _FACTS:
        return False
    call = node.value.func if isinstance(node.value, ast.Call) else None
    return call is None or (isinstance(call, ast.Name) and call.id == "scrub_ids")


def _effect(node: ast.stmt) -> list[ast.stmt]:
    """What is left of `facts.append(pool.method(...))`: the method's work."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        gathered = node.value.args[0]
        if isinstance(gathered, ast.Call) and isinstance(gathered.func, ast.Attribute):
            return [ast.Expr(gathered)]
    return []


def _names(node: ast.AST) -> set[str]:
    """Names and attributes that occur below a node."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
    return found
